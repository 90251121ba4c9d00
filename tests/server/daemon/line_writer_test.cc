#include "server/common/line_writer.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <deque>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/unique_fd.h"

namespace dmuond::server {
namespace {

using ::testing::AllOf;
using ::testing::Ge;
using ::testing::Le;
using ::testing::StartsWith;
using wire::UniqueFd;

constexpr std::chrono::seconds kPatience{20};

struct Pipe {
  Pipe() {
    std::array<int, 2> ends{};
    EXPECT_EQ(::pipe2(ends.data(), O_CLOEXEC), 0);
    reader.Reset(ends[0]);
    writer.Reset(ends[1]);
  }
  // What comes until it ends with `end`.
  [[nodiscard]] std::string ReadUntil(const std::string& end) const {
    std::string text;
    std::array<char, 4096> bytes{};
    while (!text.ends_with(end)) {
      const ssize_t n = ::read(reader.get(), bytes.data(), bytes.size());
      if (n <= 0) break;
      text.append(bytes.data(), static_cast<size_t>(n));
    }
    return text;
  }
  UniqueFd reader;
  UniqueFd writer;
};

// To the end of the process, as its thread.
struct Writer {
  explicit Writer(size_t waiting_bytes_max)
      : lines(*new LineWriter(pipe.writer.get(), waiting_bytes_max,
                              [](int64_t n) { return absl::StrCat("lost ", n, "\n"); })) {}
  static Pipe& KeptPipe() {
    static auto& kept = *new std::deque<Pipe>;
    return kept.emplace_back();
  }
  Pipe& pipe = KeptPipe();
  LineWriter& lines;
};

TEST(LineWriterTest, LinesComeWholeAndInOrder) {
  const Writer writer(1 << 20);
  writer.lines.Write("one\n");
  writer.lines.Write("two\n");
  EXPECT_TRUE(writer.lines.Flush(kPatience));
  EXPECT_EQ(writer.pipe.ReadUntil("two\n"), "one\ntwo\n");
}

TEST(LineWriterTest, LinesGoWhereTheyAreRedirectedTo) {
  const Writer writer(1 << 20);
  writer.lines.Write("one\n");
  EXPECT_TRUE(writer.lines.Flush(kPatience));
  Pipe& other = Writer::KeptPipe();
  writer.lines.Redirect(std::move(other.writer));
  writer.lines.Write("two\n");
  EXPECT_TRUE(writer.lines.Flush(kPatience));
  EXPECT_EQ(other.ReadUntil("two\n"), "two\n");
  writer.pipe.writer.Reset();
  EXPECT_EQ(writer.pipe.ReadUntil("two\n"), "one\n");
}

TEST(LineWriterTest, LinesThatAFullDiskDoesNotTakeAreCounted) {
  const Writer writer(1 << 20);
  writer.lines.Redirect(UniqueFd(::open("/dev/full", O_WRONLY | O_CLOEXEC)));
  for (const char* line : {"one\n", "two\n", "three\n"}) writer.lines.Write(line);
  EXPECT_TRUE(writer.lines.Flush(kPatience));
  Pipe& other = Writer::KeptPipe();
  writer.lines.Redirect(std::move(other.writer));
  writer.lines.Write("four\n");
  EXPECT_TRUE(writer.lines.Flush(kPatience));
  EXPECT_EQ(other.ReadUntil("four\n"), "lost 3\nfour\n");
}

TEST(LineWriterTest, NobodyWaitsForAPipeThatIsNotReadAndItsReaderHearsHowManyLinesAreLost) {
  const std::string line = std::string(127, 'x') + "\n";  // a power of two: pages are filled up
  const Writer writer(20 * line.size());
  const int page = static_cast<int>(::sysconf(_SC_PAGESIZE));
  ASSERT_EQ(::fcntl(writer.pipe.writer.get(), F_SETPIPE_SZ, page), page);
  int lines = 0;
  for (; lines * std::ssize(line) < page; ++lines) {
    writer.lines.Write(line);
    EXPECT_TRUE(writer.lines.Flush(kPatience));
  }
  // The pipe is full. Of these, 19 can wait with the last one, and one may be on its way.
  for (int i = 0; i < 100; ++i, ++lines) writer.lines.Write(line);
  writer.lines.Write("last\n");
  const std::string text = writer.pipe.ReadUntil("last\n");
  EXPECT_THAT(text, StartsWith(line));
  int lost = 0;
  int said = 0;
  for (size_t at = text.find("lost "); at != std::string::npos; at = text.find("lost ", at + 1)) {
    lost += std::stoi(text.substr(at + 5));
    ++said;
  }
  EXPECT_THAT(lost, AllOf(Ge(80), Le(81)));
  EXPECT_LE(said, 2) << "before the line that was on its way, and after it";
  EXPECT_EQ(std::count(text.begin(), text.end(), 'x') / 127 + lost, lines);
  EXPECT_TRUE(writer.lines.Flush(kPatience));
}

TEST(LineWriterTest, ADescriptorThatDoesNotWaitLosesNothing) {
  const Writer writer(1 << 20);
  ASSERT_EQ(::fcntl(writer.pipe.writer.get(), F_SETFL, O_NONBLOCK), 0);
  const std::string line = std::string(99, 'x') + "\n";
  for (int i = 0; i < 1000; ++i) writer.lines.Write(line);
  writer.lines.Write("last\n");
  EXPECT_EQ(writer.pipe.ReadUntil("last\n").size(), 1000 * line.size() + 5);
}

TEST(LineWriterTest, AReaderWhoHasGoneKeepsNobody) {
  std::signal(SIGPIPE, SIG_IGN);
  const Writer writer(1 << 20);
  writer.pipe.reader.Reset();
  writer.lines.Write("unread\n");
  EXPECT_TRUE(writer.lines.Flush(kPatience));
}

}  // namespace
}  // namespace dmuond::server
