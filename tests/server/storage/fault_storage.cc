#include "tests/server/storage/fault_storage.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

namespace dmuond::server::storage::testing {

// A file or a directory: what everybody sees, and what a crash leaves for sure.
struct FaultStorage::Node {
  bool directory = false;
  std::string data;
  std::string durable;
  bool sync_lost = false;  // a sync failed: later ones claim success and write nothing
  std::map<std::string, std::shared_ptr<Node>> names;
  std::map<std::string, std::shared_ptr<Node>> durable_names;
  std::vector<std::pair<std::string, std::shared_ptr<Node>>> pending;  // nullptr: removed
};

class FaultWritableFile : public WritableFile {
 public:
  FaultWritableFile(FaultStorage& storage, std::shared_ptr<FaultStorage::Node> node)
      : storage_(storage), node_(std::move(node)) {}

  absl::Status Append(std::span<const std::byte> data) override {
    const FaultStorage::Verdict verdict = storage_.Begin("append");
    const std::string bytes(reinterpret_cast<const char*>(data.data()), data.size());
    if (verdict.fault == Fault::kCrash) return verdict.status;
    if (verdict.fault == Fault::kError) {
      node_->data += bytes.substr(0, bytes.size() / 2);
      return verdict.status;
    }
    if (storage_.bytes_left_ >= 0 && static_cast<int64_t>(bytes.size()) > storage_.bytes_left_) {
      node_->data += bytes.substr(0, storage_.bytes_left_);
      storage_.bytes_left_ = 0;
      return absl::ResourceExhaustedError("append: no space left");
    }
    if (storage_.bytes_left_ >= 0) storage_.bytes_left_ -= static_cast<int64_t>(bytes.size());
    node_->data += bytes;
    return verdict.status;
  }

  absl::Status Sync() override {
    const FaultStorage::Verdict verdict = storage_.Begin("sync");
    if (verdict.fault == Fault::kCrash) return verdict.status;
    if (verdict.fault == Fault::kError) node_->sync_lost = true;
    if (!node_->sync_lost) node_->durable = node_->data;
    return verdict.status;
  }

  absl::Status Close() override { return storage_.Begin("close").status; }

 private:
  FaultStorage& storage_;
  std::shared_ptr<FaultStorage::Node> node_;
};

class FaultReadableFile : public ReadableFile {
 public:
  FaultReadableFile(FaultStorage& storage, std::shared_ptr<FaultStorage::Node> node)
      : storage_(storage),
        node_(std::move(node)),
        size_(static_cast<int64_t>(node_->data.size())) {}

  [[nodiscard]] int64_t size() const override { return size_; }
  absl::Status ReadAt(int64_t offset, std::span<std::byte> out) const override {
    const FaultStorage::Verdict verdict = storage_.Begin("read");
    if (!verdict.status.ok()) return verdict.status;
    if (offset < 0 || offset + out.size() > node_->data.size()) {
      return absl::OutOfRangeError(absl::StrCat("read at ", offset, " of ", out.size()));
    }
    if (out.empty()) return absl::OkStatus();
    std::memcpy(out.data(), node_->data.data() + offset, out.size());
    if (verdict.fault == Fault::kFlip) {
      const uint64_t bit = storage_.random_() % (out.size() * 8);
      out[bit / 8] ^= std::byte{1} << (bit % 8);
    }
    return absl::OkStatus();
  }

 private:
  FaultStorage& storage_;
  std::shared_ptr<FaultStorage::Node> node_;
  int64_t size_;
};

FaultStorage::FaultStorage(uint64_t seed) : random_(seed), root_(std::make_shared<Node>()) {
  root_->directory = true;
}
FaultStorage::~FaultStorage() = default;

void FaultStorage::FailAt(int64_t operation, Fault fault) {
  operations_ = 0;
  fail_at_ = operation;
  fault_ = fault;
}

FaultStorage::Verdict FaultStorage::Begin(const std::string& what) {
  const int64_t number = operations_++;
  if (crashed_) return {Fault::kCrash, absl::UnavailableError("the machine is down")};
  if (number != fail_at_) return {};
  const std::string message = absl::StrCat(what, " (operation ", number, ")");
  switch (fault_) {
    case Fault::kNone:
    case Fault::kFlip:
      return {fault_, absl::OkStatus()};
    case Fault::kError:
      return {fault_, absl::UnavailableError(absl::StrCat(message, ": input/output error"))};
    case Fault::kCrash:
    case Fault::kCrashAfter:
      crashed_ = true;
      return {fault_, absl::UnavailableError(absl::StrCat(message, ": the machine went down"))};
  }
  return {};
}

FaultStorage::Node* FaultStorage::Find(const std::string& path) {
  Node* node = root_.get();
  for (size_t at = 0; at < path.size() && node != nullptr;) {
    const size_t slash = std::min(path.find('/', at), path.size());
    const auto entry = node->names.find(path.substr(at, slash - at));
    node = entry == node->names.end() ? nullptr : entry->second.get();
    at = slash + 1;
  }
  return node;
}

absl::StatusOr<FaultStorage::Place> FaultStorage::PlaceOf(const std::string& path) {
  const size_t slash = path.rfind('/');
  const std::string parent = slash == std::string::npos ? "" : path.substr(0, slash);
  Node* directory = Find(parent);
  if (directory == nullptr || !directory->directory) {
    return absl::NotFoundError(absl::StrCat(Describe(parent), ": no such directory"));
  }
  return Place{directory, slash == std::string::npos ? path : path.substr(slash + 1)};
}

void FaultStorage::Change(Node& directory, const std::string& name, std::shared_ptr<Node> node) {
  directory.pending.emplace_back(name, node);
  if (node == nullptr) {
    directory.names.erase(name);
  } else {
    directory.names[name] = std::move(node);
  }
}

void FaultStorage::Survive(Node& directory) {
  for (const auto& [name, node] : directory.pending) {
    if (!Coin()) continue;
    if (node == nullptr) {
      directory.durable_names.erase(name);
    } else {
      directory.durable_names[name] = node;
    }
  }
  directory.pending.clear();
  directory.names = directory.durable_names;
  for (const auto& [name, node] : directory.names) {
    if (node->directory) {
      Survive(*node);
      continue;
    }
    if (node->data != node->durable && Coin()) {
      // Sizes and pages reach a disk independently: a prefix, and holes of zeros in it.
      std::string torn = node->data.substr(0, random_() % (node->data.size() + 1));
      if (!torn.empty() && Coin()) {
        const size_t hole = random_() % torn.size();
        const size_t length = std::min<size_t>(torn.size() - hole, 1 + random_() % 512);
        torn.replace(hole, length, length, '\0');
      }
      node->durable = torn;
    }
    node->data = node->durable;
    node->sync_lost = false;
  }
}

void FaultStorage::Restart() {
  Survive(*root_);
  crashed_ = false;
  bytes_left_ = -1;
  NeverFail();
}

void FaultStorage::FlipBit(const std::string& path, int64_t bit) {
  Node* node = Find(path);
  node->data[bit / 8] = static_cast<char>(node->data[bit / 8] ^ (1 << (bit % 8)));
  node->durable = node->data;
}
void FaultStorage::Truncate(const std::string& path, int64_t bytes) {
  Node* node = Find(path);
  node->data.resize(bytes);
  node->durable = node->data;
}
std::string FaultStorage::Contents(const std::string& path) { return Find(path)->data; }
void FaultStorage::SetContents(const std::string& path, const std::string& data) {
  Find(path)->data = Find(path)->durable = data;
}

absl::StatusOr<std::unique_ptr<WritableFile>> FaultStorage::Create(const std::string& path) {
  const Verdict verdict = Begin("create");
  if (verdict.fault == Fault::kCrash || verdict.fault == Fault::kError) return verdict.status;
  absl::StatusOr<Place> place = PlaceOf(path);
  if (!place.ok()) return place.status();
  if (place->directory->names.contains(place->name)) {
    return absl::AlreadyExistsError(absl::StrCat(Describe(path), ": there is one"));
  }
  auto node = std::make_shared<Node>();
  Change(*place->directory, place->name, node);
  if (!verdict.status.ok()) return verdict.status;
  return std::make_unique<FaultWritableFile>(*this, std::move(node));
}

absl::StatusOr<std::unique_ptr<ReadableFile>> FaultStorage::Open(const std::string& path) {
  if (const Verdict verdict = Begin("open"); !verdict.status.ok()) return verdict.status;
  absl::StatusOr<Place> place = PlaceOf(path);
  if (!place.ok()) return place.status();
  const auto entry = place->directory->names.find(place->name);
  if (entry == place->directory->names.end() || entry->second->directory) {
    return absl::NotFoundError(absl::StrCat(Describe(path), ": no such file"));
  }
  return std::make_unique<FaultReadableFile>(*this, entry->second);
}

absl::Status FaultStorage::Rename(const std::string& from, const std::string& to) {
  const Verdict verdict = Begin("rename");
  if (verdict.fault == Fault::kCrash || verdict.fault == Fault::kError) return verdict.status;
  absl::StatusOr<Place> source = PlaceOf(from);
  if (!source.ok()) return source.status();
  absl::StatusOr<Place> target = PlaceOf(to);
  if (!target.ok()) return target.status();
  const auto entry = source->directory->names.find(source->name);
  if (entry == source->directory->names.end()) {
    return absl::NotFoundError(absl::StrCat(Describe(from), ": no such file"));
  }
  // Two changes, of which a crash may keep one: both names, or none.
  Change(*target->directory, target->name, entry->second);
  Change(*source->directory, source->name, nullptr);
  return verdict.status;
}

absl::Status FaultStorage::Remove(const std::string& path) {
  const Verdict verdict = Begin("remove");
  if (verdict.fault == Fault::kCrash || verdict.fault == Fault::kError) return verdict.status;
  absl::StatusOr<Place> place = PlaceOf(path);
  if (!place.ok()) return place.status();
  const auto entry = place->directory->names.find(place->name);
  if (entry == place->directory->names.end() || entry->second->directory) {
    return absl::NotFoundError(absl::StrCat(Describe(path), ": no such file"));
  }
  Change(*place->directory, place->name, nullptr);
  return verdict.status;
}

absl::Status FaultStorage::MakeDirectory(const std::string& path) {
  const Verdict verdict = Begin("make directory");
  if (verdict.fault == Fault::kCrash || verdict.fault == Fault::kError) return verdict.status;
  absl::StatusOr<Place> place = PlaceOf(path);
  if (!place.ok()) return place.status();
  if (!place->directory->names.contains(place->name)) {
    auto node = std::make_shared<Node>();
    node->directory = true;
    Change(*place->directory, place->name, std::move(node));
  }
  return verdict.status;
}

absl::Status FaultStorage::SyncDirectory(const std::string& path) {
  const Verdict verdict = Begin("sync directory");
  if (verdict.fault == Fault::kCrash || verdict.fault == Fault::kError) return verdict.status;
  Node* node = Find(path);
  if (node == nullptr) return absl::NotFoundError(Describe(path));
  node->durable_names = node->names;
  node->pending.clear();
  return verdict.status;
}

absl::Status FaultStorage::RemoveDirectory(const std::string& path) {
  const Verdict verdict = Begin("remove directory");
  if (verdict.fault == Fault::kCrash || verdict.fault == Fault::kError) return verdict.status;
  absl::StatusOr<Place> place = PlaceOf(path);
  if (!place.ok()) return place.status();
  const auto entry = place->directory->names.find(place->name);
  if (entry == place->directory->names.end()) return absl::NotFoundError(Describe(path));
  if (!entry->second->names.empty()) return absl::UnavailableError("directory not empty");
  Change(*place->directory, place->name, nullptr);
  return verdict.status;
}

absl::StatusOr<std::vector<std::string>> FaultStorage::List(const std::string& path) {
  if (const Verdict verdict = Begin("list"); !verdict.status.ok()) return verdict.status;
  Node* node = Find(path);
  if (node == nullptr || !node->directory) return absl::NotFoundError(Describe(path));
  std::vector<std::string> names;
  for (const auto& [name, child] : node->names) names.push_back(name);
  return names;
}

}  // namespace dmuond::server::storage::testing
