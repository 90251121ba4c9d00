#include "server/storage/posix_storage.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "tests/server/daemon/support.h"

namespace dmuond::server::storage {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class PosixStorageTest : public ::testing::Test {
 protected:
  static std::span<const std::byte> Bytes(const std::string& text) {
    return std::as_bytes(std::span<const char>(text));
  }
  absl::Status Write(const std::string& path, const std::string& text) {
    auto file = storage_->Create(path);
    if (!file.ok()) return file.status();
    absl::Status status = (*file)->Append(Bytes(text));
    if (status.ok()) status = (*file)->Sync();
    if (status.ok()) status = (*file)->Close();
    return status;
  }
  TempDir directory_;
  std::unique_ptr<Storage> storage_ = OpenPosixStorage(directory_.path()).value();
};

TEST_F(PosixStorageTest, WritesReadsRenamesListsAndRemoves) {
  ASSERT_TRUE(storage_->MakeDirectory("job").ok());
  ASSERT_TRUE(storage_->MakeDirectory("job").ok()) << "there already";
  ASSERT_TRUE(Write("job/b.tmp", "hello").ok());
  ASSERT_TRUE(Write("job/a", "x").ok());
  ASSERT_TRUE(storage_->Rename("job/b.tmp", "job/b").ok());
  ASSERT_TRUE(storage_->SyncDirectory("job").ok());
  ASSERT_TRUE(storage_->SyncDirectory("").ok());
  EXPECT_THAT(storage_->List("job").value(), ElementsAre("a", "b"));
  const auto file = storage_->Open("job/b");
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ((*file)->size(), 5);
  std::vector<std::byte> part(3);
  ASSERT_TRUE((*file)->ReadAt(2, part).ok());
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(part.data()), 3), "llo");
  const absl::Status beyond = (*file)->ReadAt(3, part);
  EXPECT_EQ(beyond.code(), absl::StatusCode::kOutOfRange);
  EXPECT_THAT(std::string(beyond.message()), HasSubstr("job/b"));
  ASSERT_TRUE(storage_->Remove("job/a").ok());
  ASSERT_TRUE(storage_->Remove("job/b").ok());
  EXPECT_TRUE(storage_->RemoveDirectory("job").ok());
  EXPECT_TRUE(absl::IsNotFound(storage_->List("job").status()));
}

TEST_F(PosixStorageTest, NothingIsDurableInADirectoryThatWasReplacedOrIsGone) {
  const std::string path = directory_.path() + "/root";
  const std::string away = directory_.path() + "/away";
  std::filesystem::create_directory(path);
  const auto storage = OpenPosixStorage(path).value();
  ASSERT_TRUE(storage->MakeDirectory("job").ok());
  ASSERT_TRUE(storage->SyncDirectory("job").ok());

  std::filesystem::rename(path, away);
  const absl::Status gone = storage->SyncDirectory("job");
  EXPECT_EQ(gone.code(), absl::StatusCode::kFailedPrecondition) << gone;
  EXPECT_THAT(std::string(gone.message()), HasSubstr(path + " is not there any more"));
  EXPECT_THAT(std::string(gone.message()), HasSubstr("do not end the daemon before"));

  std::filesystem::create_directory(path);
  const absl::Status replaced = storage->SyncDirectory("job");
  EXPECT_EQ(replaced.code(), absl::StatusCode::kFailedPrecondition) << replaced;
  EXPECT_THAT(std::string(replaced.message()), HasSubstr(path + " is another directory"));

  std::filesystem::remove(path);
  std::filesystem::rename(away, path);
  EXPECT_TRUE(storage->SyncDirectory("job").ok()) << "it is back";
}

TEST_F(PosixStorageTest, LargeWritesArriveWhole) {
  std::string text(70 << 20, '\0');
  for (size_t i = 0; i < text.size(); i += 4093) text[i] = static_cast<char>(i);
  ASSERT_TRUE(Write("large", text).ok());
  const auto file = storage_->Open("large");
  ASSERT_TRUE(file.ok());
  std::string back(text.size(), 'x');
  ASSERT_TRUE((*file)->ReadAt(0, std::as_writable_bytes(std::span<char>(back))).ok());
  EXPECT_TRUE(back == text);
}

TEST_F(PosixStorageTest, ErrorsNameThePathAndKeepTheirKind) {
  EXPECT_TRUE(absl::IsNotFound(storage_->Open("none").status()));
  EXPECT_TRUE(absl::IsNotFound(storage_->Remove("none")));
  EXPECT_TRUE(absl::IsNotFound(storage_->Create("no/file").status()));
  ASSERT_TRUE(Write("a", "x").ok());
  const absl::Status twice = storage_->Create("a").status();
  EXPECT_TRUE(absl::IsAlreadyExists(twice));
  EXPECT_THAT(std::string(twice.message()), HasSubstr(directory_ / "a"));
  EXPECT_TRUE(absl::IsNotFound(OpenPosixStorage(directory_ / "none").status()));
  EXPECT_FALSE(storage_->MakeDirectory("a").ok()) << "a file has the name";
}

TEST_F(PosixStorageTest, LinksPipesAndDirectoriesAreNotOpened) {
  ASSERT_TRUE(Write("a", "x").ok());
  std::filesystem::create_symlink(directory_ / "a", directory_ / "link");
  std::filesystem::create_directory_symlink("/tmp", directory_ / "directory");
  ASSERT_EQ(::mkfifo((directory_ / "pipe").c_str(), 0600), 0);
  EXPECT_FALSE(storage_->Open("link").ok());
  EXPECT_FALSE(storage_->Open("pipe").ok());
  EXPECT_FALSE(storage_->Open("").ok());
  EXPECT_FALSE(storage_->List("directory").ok());
  EXPECT_FALSE(storage_->MakeDirectory("directory").ok());
}

TEST_F(PosixStorageTest, FilesAreNotForEverybody) {
  ASSERT_TRUE(storage_->MakeDirectory("job").ok());
  ASSERT_TRUE(Write("job/a", "x").ok());
  struct stat info {};
  ASSERT_EQ(::stat((directory_ / "job/a").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 07137, 0);
  ASSERT_EQ(::stat((directory_ / "job").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 07027, 0);
}

TEST_F(PosixStorageTest, NoSpaceIsResourceExhausted) {
  struct rlimit before {};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto old = std::signal(SIGXFSZ, SIG_IGN);
  const struct rlimit small { 1000, before.rlim_max };
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const absl::Status status = Write("a", std::string(2000, 'x'));
  ::setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, old);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
}

}  // namespace
}  // namespace dmuond::server::storage
