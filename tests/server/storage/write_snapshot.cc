// write_snapshot DIRECTORY STEP TRAINERS NODES LANES_PER_NODE: one snapshot of the tests' job, for
// tests in other languages.
#include <cstdlib>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "server/storage/posix_storage.h"
#include "tests/server/storage/snapshots.h"

int main(int argc, char** argv) {
  using dmuond::server::storage::OpenPosixStorage;
  using dmuond::server::storage::testing::MakeJob;
  using dmuond::server::storage::testing::Save;
  if (argc != 6) {
    std::cerr << "usage: write_snapshot DIRECTORY STEP TRAINERS NODES LANES_PER_NODE\n";
    return 2;
  }
  const auto storage = OpenPosixStorage(argv[1]);
  absl::Status status = storage.status();
  if (status.ok()) {
    status = Save(**storage, MakeJob(std::atoi(argv[3]), std::atoi(argv[4]), std::atoi(argv[5])),
                  std::atoll(argv[2]));
  }
  if (!status.ok()) std::cerr << status << "\n";
  return status.ok() ? 0 : 1;
}
