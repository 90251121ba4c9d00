#include "server/storage/watched_storage.h"

#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/server/storage/fault_storage.h"

namespace dmuond::server::storage {
namespace {

using ::testing::ElementsAre;

// Says when it is in an operation.
class Telling : public testing::FaultStorage {
 public:
  Telling() : FaultStorage(1) {}
  std::function<void()> in_an_operation;

  absl::StatusOr<std::unique_ptr<WritableFile>> Create(const std::string& path) override {
    in_an_operation();
    auto file = FaultStorage::Create(path);
    if (!file.ok()) return file.status();
    return std::make_unique<File>(*this, *std::move(file));
  }
  absl::Status Rename(const std::string& from, const std::string& to) override {
    in_an_operation();
    return FaultStorage::Rename(from, to);
  }
  absl::Status SyncDirectory(const std::string& path) override {
    in_an_operation();
    return FaultStorage::SyncDirectory(path);
  }

 private:
  struct File : WritableFile {
    File(Telling& storage, std::unique_ptr<WritableFile> file)
        : storage(storage), file(std::move(file)) {}
    ~File() override {
      if (file != nullptr) storage.in_an_operation();
    }
    absl::Status Append(std::span<const std::byte> data) override {
      storage.in_an_operation();
      return file->Append(data);
    }
    absl::Status Sync() override {
      storage.in_an_operation();
      return file->Sync();
    }
    absl::Status Close() override {
      storage.in_an_operation();
      return std::exchange(file, nullptr)->Close();
    }
    Telling& storage;
    std::unique_ptr<WritableFile> file;
  };
};

TEST(WatchedStorageTest, ShowsEachOperationWhileItIsUnderWayAndNoneBetween) {
  Telling inner;
  WatchedStorage watched(inner);
  std::vector<std::string> seen;
  std::set<uint64_t> numbers;
  inner.in_an_operation = [&] {
    const std::optional<Operation> at = watched.Current();
    ASSERT_TRUE(at.has_value());
    seen.push_back(at->what);
    numbers.insert(at->number);
  };
  const auto between = [&] { EXPECT_FALSE(watched.Current().has_value()) << seen.back(); };
  const std::byte byte{1};
  {
    auto file = watched.Create("a");
    ASSERT_TRUE(file.ok()) << file.status();
    between();
    EXPECT_TRUE((*file)->Append({&byte, 1}).ok());
    between();
    EXPECT_TRUE((*file)->Sync().ok());
    EXPECT_TRUE((*file)->Close().ok());
    between();
  }
  EXPECT_TRUE(watched.Rename("a", "b").ok());
  EXPECT_TRUE(watched.SyncDirectory("").ok());
  { auto left_open = watched.Create("c"); }
  between();
  EXPECT_THAT(seen, ElementsAre("create /a", "write to /a", "fsync /a", "close /a", "rename to /b",
                                "fsync directory /", "create /c", "close /c"));
  EXPECT_EQ(numbers.size(), seen.size());
  EXPECT_EQ(inner.Contents("b"), std::string(1, '\1'));
}

}  // namespace
}  // namespace dmuond::server::storage
