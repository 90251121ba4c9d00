#include "server/common/module_id.h"

#include <elf.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/unique_fd.h"

namespace dmuond::server {
namespace {

constexpr size_t kNotesBytesMax = size_t{1} << 16;
constexpr size_t kSegmentsMax = 1024;

bool ReadAt(int fd, void* into, size_t bytes, size_t offset) {
  return ::pread(fd, into, bytes, static_cast<off_t>(offset)) == static_cast<ssize_t>(bytes);
}

// Empty: it is no ELF file of this machine's kind, or has none.
std::string BuildIdOf(int fd) {
  Elf64_Ehdr header{};
  if (!ReadAt(fd, &header, sizeof(header), 0) ||
      std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0 || header.e_ident[EI_CLASS] != ELFCLASS64 ||
      header.e_phentsize != sizeof(Elf64_Phdr) || header.e_phnum > kSegmentsMax) {
    return "";
  }
  std::vector<Elf64_Phdr> segments(header.e_phnum);
  if (!ReadAt(fd, segments.data(), segments.size() * sizeof(Elf64_Phdr), header.e_phoff)) return "";
  for (const Elf64_Phdr& segment : segments) {
    if (segment.p_type != PT_NOTE || segment.p_filesz > kNotesBytesMax) continue;
    std::string notes(segment.p_filesz, '\0');
    if (!ReadAt(fd, notes.data(), notes.size(), segment.p_offset)) continue;
    if (std::string id = BuildIdIn(notes, segment.p_align); !id.empty()) return id;
  }
  return "";
}

}  // namespace

std::string BuildIdIn(absl::string_view notes, size_t align) {
  constexpr absl::string_view kOwner("GNU\0", 4);
  const size_t step = align == 8 ? 8 : 4;
  const auto padded = [step](size_t bytes) { return (bytes + step - 1) / step * step; };
  Elf64_Nhdr note{};
  while (notes.size() >= sizeof(note)) {
    std::memcpy(&note, notes.data(), sizeof(note));
    notes.remove_prefix(sizeof(note));
    const size_t name_bytes = padded(note.n_namesz);
    const size_t bytes = name_bytes + padded(note.n_descsz);
    if (name_bytes + note.n_descsz > notes.size()) return "";
    if (note.n_type == NT_GNU_BUILD_ID && notes.substr(0, note.n_namesz) == kOwner) {
      return absl::StrCat("build-id ",
                          absl::BytesToHexString(notes.substr(name_bytes, note.n_descsz)));
    }
    if (bytes > notes.size()) return "";
    notes.remove_prefix(bytes);
  }
  return "";
}

absl::StatusOr<std::string> ModuleIdOf(const std::string& path) {
  const wire::UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  struct stat status {};
  if (!fd.valid() || ::fstat(fd.get(), &status) != 0) return absl::ErrnoToStatus(errno, path);
  if (std::string id = BuildIdOf(fd.get()); !id.empty()) return id;
  return absl::StrCat(status.st_size, " bytes of ",
                      absl::FormatTime(absl::RFC3339_full, absl::TimeFromTimespec(status.st_mtim),
                                       absl::UTCTimeZone()));
}

}  // namespace dmuond::server
