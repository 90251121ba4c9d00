// A directory of a mounted file system.
#ifndef DMUOND_SERVER_STORAGE_POSIX_STORAGE_H_
#define DMUOND_SERVER_STORAGE_POSIX_STORAGE_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "server/storage/storage.h"

namespace dmuond::server::storage {

// Its SyncDirectory() fails, with FAILED_PRECONDITION, once `root` leads nowhere or elsewhere (it
// was unmounted, say): nobody would find what is there. NOT_FOUND or UNAVAILABLE, naming the
// directory, where `root` is none that can be opened.
absl::StatusOr<std::unique_ptr<Storage>> OpenPosixStorage(const std::string& root);

}  // namespace dmuond::server::storage

#endif  // DMUOND_SERVER_STORAGE_POSIX_STORAGE_H_
