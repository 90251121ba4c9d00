// Tells builds of a program or library apart, so that a file that was replaced on disk is known
// from the one that a process has loaded.
//
//   ModuleIdOf("/usr/lib/x86_64-linux-gnu/libopenblas.so.0")  →  "build-id 4f1e…"
//
// Threads: any.
#ifndef DMUOND_SERVER_COMMON_MODULE_ID_H_
#define DMUOND_SERVER_COMMON_MODULE_ID_H_

#include <cstddef>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace dmuond::server {

// "build-id 4f1e…", from a segment of ELF notes; empty: there is none in it. `align`: of the
// segment, which is that of its notes.
[[nodiscard]] std::string BuildIdIn(absl::string_view notes, size_t align);

// The build-id of the ELF file that lies at `path` now. Where it has none: its size and the time at
// which it was changed, "73012 bytes of 2026-03-01T10:00:00Z". An error says why it cannot be read.
[[nodiscard]] absl::StatusOr<std::string> ModuleIdOf(const std::string& path);

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_COMMON_MODULE_ID_H_
