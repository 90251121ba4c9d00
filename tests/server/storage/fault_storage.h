// A file system in memory that forgets what was not synced, as badly as POSIX lets it, and fails
// where a test says. Every operation has a number, so that a test can fail each of them in turn.
//
//   FaultStorage storage(seed);
//   storage.FailAt(17, Fault::kCrash);
//   … UNAVAILABLE from operation 17 on …
//   storage.Restart();   // what has survived
#ifndef DMUOND_TESTS_SERVER_STORAGE_FAULT_STORAGE_H_
#define DMUOND_TESTS_SERVER_STORAGE_FAULT_STORAGE_H_

#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "server/storage/storage.h"

namespace dmuond::server::storage::testing {

enum class Fault : uint8_t {
  kNone,
  kCrash,       // the operation and all after it fail; nothing of it is done
  kCrashAfter,  // the operation is done, its caller never hears of it
  kError,       // it alone fails; an Append is half done, a Sync loses what it should have synced
  kFlip         // a read gives a flipped bit
};

class FaultStorage : public Storage {
 public:
  struct Node;

  explicit FaultStorage(uint64_t seed);
  ~FaultStorage() override;

  // Counts operations anew, from 0.
  void FailAt(int64_t operation, Fault fault);
  void NeverFail() { FailAt(-1, Fault::kNone); }
  // Room for so many more bytes; -1: no limit. Appends fail half-way when it is used up.
  void LimitBytes(int64_t bytes) { bytes_left_ = bytes; }
  [[nodiscard]] int64_t operations() const { return operations_; }
  [[nodiscard]] bool crashed() const { return crashed_; }

  // The machine comes up again: of bytes and names that were not synced, some have survived, some
  // have not, independently of their order.
  void Restart();

  // Of a file that is there.
  void FlipBit(const std::string& path, int64_t bit);
  void Truncate(const std::string& path, int64_t bytes);
  [[nodiscard]] std::string Contents(const std::string& path);
  void SetContents(const std::string& path, const std::string& data);

  [[nodiscard]] std::string Describe(const std::string& path) const override { return "/" + path; }
  absl::StatusOr<std::unique_ptr<WritableFile>> Create(const std::string& path) override;
  absl::StatusOr<std::unique_ptr<ReadableFile>> Open(const std::string& path) override;
  absl::Status Rename(const std::string& from, const std::string& to) override;
  absl::Status Remove(const std::string& path) override;
  absl::Status MakeDirectory(const std::string& path) override;
  absl::Status SyncDirectory(const std::string& path) override;
  absl::Status RemoveDirectory(const std::string& path) override;
  absl::StatusOr<std::vector<std::string>> List(const std::string& path) override;

 private:
  friend class FaultWritableFile;
  friend class FaultReadableFile;
  struct Place {
    Node* directory;
    std::string name;
  };
  // What happens to the operation that begins now.
  struct Verdict {
    Fault fault = Fault::kNone;
    absl::Status status;  // not OK: return it, after doing whatever the fault does
  };
  Verdict Begin(const std::string& what);
  Node* Find(const std::string& path);
  absl::StatusOr<Place> PlaceOf(const std::string& path);
  static void Change(Node& directory, const std::string& name, std::shared_ptr<Node> node);
  void Survive(Node& directory);
  [[nodiscard]] bool Coin() { return (random_() & 1) != 0; }

  std::mt19937_64 random_;
  std::shared_ptr<Node> root_;
  int64_t operations_ = 0;
  int64_t fail_at_ = -1;
  Fault fault_ = Fault::kNone;
  bool crashed_ = false;
  int64_t bytes_left_ = -1;
};

}  // namespace dmuond::server::storage::testing

#endif  // DMUOND_TESTS_SERVER_STORAGE_FAULT_STORAGE_H_
