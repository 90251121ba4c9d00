#include "server/daemon/memory/record_file.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace dmuond::server {
namespace {

using scheduler::RecordPart;
using Kind = RecordPart::Kind;

// What a record is to have: the bytes of its parts.
using PartBytes = std::map<RecordPart, std::string>;

absl::Status Write(RecordFile& file, const PartBytes& contents, int* serialised = nullptr) {
  std::vector<RecordPart> parts;
  for (const auto& [part, bytes] : contents) parts.push_back(part);
  return file.Write(parts, [&](const RecordPart& part, std::string& bytes) {
    bytes = contents.at(part);
    if (serialised != nullptr) ++*serialised;
  });
}

std::string TextOf(const PartBytes& contents) {
  std::string text;
  for (const auto& [part, bytes] : contents) text += bytes;
  return text;
}

std::string ImageOf(const RecordFile& file) {
  std::string image(file.size(), '\0');
  EXPECT_EQ(::pread(file.fd(), image.data(), image.size(), 0), static_cast<ssize_t>(image.size()));
  return image;
}

// A decision changes the progress and drops the submissions; `step` makes it differ.
PartBytes Decided(int step) {
  return {{{Kind::kProgress, 0, static_cast<uint64_t>(2 * step)}, absl::StrCat("decided ", step)},
          {{Kind::kPlan, 0, 1}, std::string(5000, 'p')},
          {{Kind::kSession, 1, 7}, "a session"}};
}
PartBytes Submitted(int step) {
  PartBytes contents = Decided(step);
  contents[{Kind::kSubmission, 0, static_cast<uint64_t>(step)}] = absl::StrCat("submitted ", step);
  contents[{Kind::kTrainerState, 0, static_cast<uint64_t>(step)}] =
      std::string(700, 'a' + step % 20);
  return contents;
}

TEST(RecordFileTest, TheLastWriteIsRead) {
  RecordFile file;
  EXPECT_EQ(file.fd(), -1);
  for (int step = 1; step < 40; ++step) {
    for (const PartBytes& contents : {Decided(step), Submitted(step)}) {
      ASSERT_TRUE(Write(file, contents).ok());
      EXPECT_EQ(*ReadRecord(file.fd()), TextOf(contents));
    }
  }
}

TEST(RecordFileTest, OnlyWhatHasChangedIsMadeAnew) {
  RecordFile file;
  int serialised = 0;
  ASSERT_TRUE(Write(file, Submitted(1), &serialised).ok());
  EXPECT_EQ(serialised, 5);
  PartBytes next = Decided(2);
  next[{Kind::kTrainerState, 0, 1}] = Submitted(1).at({Kind::kTrainerState, 0, 1});
  serialised = 0;
  ASSERT_TRUE(Write(file, next, &serialised).ok());
  EXPECT_EQ(serialised, 1);
  EXPECT_EQ(*ReadRecord(file.fd()), TextOf(next));
}

TEST(RecordFileTest, WritesOfOneSizeDoNotMakeItGrow) {
  RecordFile file;
  for (int step = 1; step < 4; ++step) {
    ASSERT_TRUE(Write(file, Decided(step)).ok());
    ASSERT_TRUE(Write(file, Submitted(step)).ok());
  }
  const uint64_t size = file.size();
  for (int step = 4; step < 10'000; ++step) {
    ASSERT_TRUE(Write(file, Decided(step)).ok());
    ASSERT_TRUE(Write(file, Submitted(step)).ok());
  }
  EXPECT_EQ(file.size(), size);
}

// The writer ends after any byte that it has written: parts and tables in any order, roots last.
TEST(RecordFileTest, AWriterThatEndsInTheMiddleLeavesTheOldRecordOrTheNew) {
  RecordFile file;
  PartBytes before;
  std::string old_image(256, '\0');
  for (int step = 1; step < 12; ++step) {
    PartBytes contents = step % 2 == 0 ? Submitted(step) : Decided(step);
    // Large enough to make the file grow.
    if (step == 8) contents[{Kind::kTrainerState, 9, 1}] = std::string(200'000, 'g');
    ASSERT_TRUE(Write(file, contents).ok());
    const std::string image = ImageOf(file);
    std::string torn = old_image;
    torn.resize(image.size());
    std::vector<size_t> changed;
    for (size_t i = 256; i < image.size(); ++i) {
      if (torn[i] != image[i]) changed.push_back(i);
    }
    if (step == 1) {
      // What the file is, is written when it is made, before there is any record.
      for (size_t i = 0; i < 64; ++i) torn[i] = image[i];
    }
    for (size_t i = 64; i < 256; ++i) {
      if (torn[i] != image[i]) changed.push_back(i);
    }
    const auto is_old = [&](const absl::StatusOr<std::string>& record) {
      return step == 1 ? absl::IsNotFound(record.status())
                       : record.ok() && *record == TextOf(before);
    };
    // A record of 200,000 bytes is read after each of its first and last bytes, and some between.
    const size_t stride = changed.size() > 20'000 ? 997 : 1;
    ASSERT_TRUE(is_old(RecordIn(torn)));
    bool old = true;
    for (size_t i = 0; i < changed.size(); ++i) {
      torn[changed[i]] = image[changed[i]];
      const bool close = i < 100 || i + 500 > changed.size();
      if (!close && i % stride != 0) continue;
      const absl::StatusOr<std::string> record = RecordIn(torn);
      const bool is_new = record.ok() && *record == TextOf(contents);
      ASSERT_TRUE(is_old(record) || is_new) << "step " << step << ", byte " << changed[i];
      ASSERT_TRUE(old || is_new) << "the record has gone back";
      old = !is_new;
    }
    EXPECT_FALSE(old);
    old_image = image;
    before = contents;
  }
}

TEST(RecordFileTest, WhatIsDamagedIsNotRead) {
  RecordFile file;
  ASSERT_TRUE(Write(file, Decided(1)).ok());
  const std::string image = ImageOf(file);
  for (size_t i = 0; i < 6000; ++i) {
    std::string damaged = image;
    damaged[i] = static_cast<char>(damaged[i] ^ 1);
    const absl::StatusOr<std::string> record = RecordIn(damaged);
    EXPECT_TRUE(!record.ok() || *record == TextOf(Decided(1))) << i;
  }
  for (const size_t size : {0UL, 10UL, 256UL, 300UL, image.size() - 65536 + 4000}) {
    EXPECT_FALSE(RecordIn(absl::string_view(image).substr(0, size)).ok()) << size;
  }
}

TEST(RecordFileTest, WithoutMemoryThereIsNoRecordUntilThereIs) {
  RecordFile file(/*bytes_max=*/size_t{1} << 17);
  ASSERT_TRUE(Write(file, Decided(1)).ok());
  PartBytes large = Decided(2);
  large[{Kind::kTrainerState, 0, 1}] = std::string(size_t{1} << 17, 's');
  EXPECT_TRUE(absl::IsResourceExhausted(Write(file, large)));
  EXPECT_TRUE(absl::IsNotFound(ReadRecord(file.fd()).status()));
  EXPECT_FALSE(Write(file, large).ok());
  ASSERT_TRUE(Write(file, Decided(3)).ok());
  EXPECT_EQ(*ReadRecord(file.fd()), TextOf(Decided(3)));
}

TEST(RecordFileTest, WhatIsNoRecordIsRefused) {
  const wire::UniqueFd other(::memfd_create("other", MFD_CLOEXEC));
  ASSERT_EQ(::ftruncate(other.get(), 4096), 0);
  EXPECT_TRUE(absl::IsDataLoss(ReadRecord(other.get()).status()));
  EXPECT_FALSE(ReadRecord(-1).ok());
}

}  // namespace
}  // namespace dmuond::server
