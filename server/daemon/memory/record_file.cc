#include "server/daemon/memory/record_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "google/protobuf/arena.h"
#include "server/storage/checksum.h"

namespace dmuond::server {
namespace {

// All numbers as the machine has them: no record leaves it.
constexpr absl::string_view kWhat = "dmuond job record 1\n";
constexpr uint64_t kRootBytes = 64;
constexpr uint64_t kRoots = 64;
constexpr uint64_t kFirst = 256;      // where parts begin
constexpr uint64_t kAlignment = 64;   // of parts: a cache line
constexpr uint64_t kGrowsBy = 65536;  // at least

struct Root {
  uint64_t write = 0;  // 0: there is none
  uint64_t table = 0;
  uint64_t entries = 0;
  uint64_t table_checksum = 0;
  uint64_t checksum = 0;  // of the fields before it
};
static_assert(sizeof(Root) <= kRootBytes);

struct Entry {
  uint64_t offset = 0;
  uint64_t bytes = 0;
  uint64_t checksum = 0;
};

uint64_t ChecksumOf(absl::string_view bytes) {
  return storage::Checksum64Of(std::as_bytes(std::span(bytes)));
}

uint64_t ChecksumOf(const Root& root) {
  return ChecksumOf({reinterpret_cast<const char*>(&root), offsetof(Root, checksum)});
}

uint64_t RoundUp(uint64_t bytes, uint64_t to) { return (bytes + to - 1) / to * to; }

}  // namespace

RecordFile::~RecordFile() {
  if (data_ != nullptr) ::munmap(data_, size_);
}

absl::Status RecordFile::Write(const scheduler::NodeJob& job) {
  return Write(job.RecordParts(), [&job](const scheduler::RecordPart& part, std::string& bytes) {
    // What changes with steps fits into the buffer, and needs no other memory.
    std::array<char, size_t{16} << 10> buffer;
    google::protobuf::Arena arena(buffer.data(), buffer.size());
    auto* alone = google::protobuf::Arena::CreateMessage<scheduler::JobRecord>(&arena);
    job.WritePart(part, *alone);
    alone->AppendToString(&bytes);
  });
}

absl::Status RecordFile::Write(
    const std::vector<scheduler::RecordPart>& parts,
    absl::FunctionRef<void(const scheduler::RecordPart& part, std::string& bytes)> serialise) {
  absl::Status written = fd_.valid() ? absl::OkStatus() : Create();
  if (written.ok()) written = WriteParts(parts, serialise);
  if (!written.ok()) Forget();
  return written;
}

absl::Status RecordFile::WriteParts(
    const std::vector<scheduler::RecordPart>& parts,
    absl::FunctionRef<void(const scheduler::RecordPart& part, std::string& bytes)> serialise) {
  std::vector<Part>& next = next_;
  next.clear();
  dropped_.clear();
  auto before = parts_.begin();
  const auto drop_until = [&](const scheduler::RecordPart* name) {
    for (; before != parts_.end() && (name == nullptr || before->name < *name); ++before) {
      dropped_.push_back(before->offset);
    }
  };
  for (const scheduler::RecordPart& name : parts) {
    drop_until(&name);
    if (before != parts_.end() && before->name == name) {
      next.push_back(*before++);
      continue;
    }
    scratch_.clear();
    serialise(name, scratch_);
    const absl::StatusOr<uint64_t> offset = Lay(scratch_);
    if (!offset.ok()) return offset.status();
    next.push_back({name, *offset, scratch_.size(), ChecksumOf(scratch_)});
  }
  drop_until(nullptr);
  scratch_.clear();
  for (const Part& part : next) {
    const Entry entry{part.offset, part.bytes, part.checksum};
    scratch_.append(reinterpret_cast<const char*>(&entry), sizeof(entry));
  }
  const absl::StatusOr<uint64_t> table = Lay(scratch_);
  if (!table.ok()) return table.status();
  const uint64_t old_table = std::exchange(table_, *table);
  parts_.swap(next);
  WriteRoot(table_, ChecksumOf(scratch_));
  if (old_table != 0) Free(old_table);
  for (const uint64_t offset : dropped_) Free(offset);
  return absl::OkStatus();
}

void RecordFile::WriteRoot(uint64_t table, uint64_t checksum) {
  Root root{++writes_, table, parts_.size(), checksum};
  root.checksum = ChecksumOf(root);
  // Checksums find whatever the processor has not written when it ends; a process ends between two
  // instructions, and the compiler keeps these in their order.
  std::atomic_signal_fence(std::memory_order_seq_cst);
  std::memcpy(data_ + kRoots + writes_ % 2 * kRootBytes, &root, sizeof(root));
  std::atomic_signal_fence(std::memory_order_seq_cst);
}

void RecordFile::Forget() {
  // The last write's root goes last: until then it is the record.
  for (const uint64_t write : {writes_ + 1, writes_}) {
    if (data_ == nullptr) break;
    std::memset(data_ + kRoots + write % 2 * kRootBytes, 0, kRootBytes);
    std::atomic_signal_fence(std::memory_order_seq_cst);
  }
  used_.clear();
  parts_.clear();
  table_ = 0;
}

absl::Status RecordFile::Create() {
  wire::UniqueFd fd(::memfd_create("dmuond job record", MFD_CLOEXEC));
  if (!fd.valid()) return absl::ErrnoToStatus(errno, "memfd_create");
  fd_ = std::move(fd);
  if (absl::Status grown = Grow(kFirst); !grown.ok()) {
    fd_.Reset();
    return grown;
  }
  std::memcpy(data_, kWhat.data(), kWhat.size());
  return absl::OkStatus();
}

absl::Status RecordFile::Grow(uint64_t bytes) {
  const uint64_t size = RoundUp(std::max(bytes, size_ + size_ / 2), kGrowsBy);
  if (size > bytes_max_) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the job's record would have ", size, " bytes; at most ", bytes_max_));
  }
  int error = 0;
  do {
    error =
        ::posix_fallocate(fd_.get(), static_cast<off_t>(size_), static_cast<off_t>(size - size_));
  } while (error == EINTR);
  if (error != 0) {
    return absl::ErrnoToStatus(error, absl::StrCat("posix_fallocate of ", size, " bytes"));
  }
  void* data = data_ == nullptr
                   ? ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd_.get(), 0)
                   : ::mremap(data_, size_, size, MREMAP_MAYMOVE);
  if (data == MAP_FAILED) {
    return absl::ErrnoToStatus(errno, absl::StrCat("mapping ", size, " bytes"));
  }
  data_ = static_cast<std::byte*>(data);
  size_ = size;
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> RecordFile::Lay(absl::string_view bytes) {
  const uint64_t needed = RoundUp(std::max<uint64_t>(bytes.size(), 1), kAlignment);
  uint64_t offset = kFirst;
  auto after = used_.begin();
  while (after != used_.end() && after->offset - offset < needed) {
    offset = after->offset + after->bytes;
    ++after;
  }
  if (offset + needed > size_) {
    if (absl::Status grown = Grow(offset + needed); !grown.ok()) return grown;
  }
  used_.insert(after, {offset, needed});
  std::memcpy(data_ + offset, bytes.data(), bytes.size());
  return offset;
}

void RecordFile::Free(uint64_t offset) {
  used_.erase(
      std::lower_bound(used_.begin(), used_.end(), offset,
                       [](const Extent& extent, uint64_t at) { return extent.offset < at; }));
}

// ---- reading ----

namespace {

// A part of the file, if it is what was laid there.
std::optional<absl::string_view> Laid(absl::string_view file, uint64_t offset, uint64_t bytes,
                                      uint64_t checksum) {
  if (offset < kFirst || offset > file.size() || bytes > file.size() - offset) return std::nullopt;
  const absl::string_view laid = file.substr(offset, bytes);
  if (ChecksumOf(laid) != checksum) return std::nullopt;
  return laid;
}

std::optional<std::string> RecordOf(absl::string_view file, const Root& root) {
  if (root.entries > file.size() / sizeof(Entry)) return std::nullopt;
  const auto table = Laid(file, root.table, root.entries * sizeof(Entry), root.table_checksum);
  if (!table.has_value()) return std::nullopt;
  std::string record;
  for (uint64_t i = 0; i < root.entries; ++i) {
    Entry entry;
    std::memcpy(&entry, table->data() + i * sizeof(Entry), sizeof(Entry));
    const auto part = Laid(file, entry.offset, entry.bytes, entry.checksum);
    if (!part.has_value()) return std::nullopt;
    record.append(part->data(), part->size());
  }
  return record;
}

}  // namespace

absl::StatusOr<std::string> RecordIn(absl::string_view file) {
  if (file.size() < kFirst || file.substr(0, kWhat.size()) != kWhat) {
    return absl::DataLossError("this is no record of a job");
  }
  std::array<Root, 2> roots;
  for (size_t i = 0; i < roots.size(); ++i) {
    std::memcpy(&roots[i], file.data() + kRoots + i * kRootBytes, sizeof(Root));
  }
  // A root that is there in part was never the last one.
  const Root* last = nullptr;
  for (const Root& root : roots) {
    if (root.checksum != ChecksumOf(root)) continue;
    if (last == nullptr || root.write > last->write) last = &root;
  }
  if (last == nullptr) return absl::NotFoundError("there is no record of a job");
  std::optional<std::string> record = RecordOf(file, *last);
  if (!record.has_value()) return absl::DataLossError("the record of a job is broken");
  return *std::move(record);
}

absl::StatusOr<std::string> ReadRecord(int fd) {
  struct stat status {};
  if (::fstat(fd, &status) != 0) return absl::ErrnoToStatus(errno, "fstat of a job's record");
  std::string file(static_cast<size_t>(status.st_size), '\0');
  for (size_t done = 0; done < file.size();) {
    const ssize_t read =
        ::pread(fd, file.data() + done, file.size() - done, static_cast<off_t>(done));
    if (read < 0 && errno == EINTR) continue;
    if (read < 0) return absl::ErrnoToStatus(errno, "reading a job's record");
    if (read == 0) return absl::DataLossError("the record of a job has become shorter");
    done += static_cast<size_t>(read);
  }
  return RecordIn(file);
}

}  // namespace dmuond::server
