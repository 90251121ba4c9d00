// A trainer process that lives to a given point of its life and stays there until it is killed:
//   phase_trainer ADDRESS RANK WORLD open|registered|attached|pushed|submitted
// The daemon's status says when it has got there.
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <string>

#include "dmuond/client/session.h"

namespace {

using dmuond::client::LayoutBuilder;
using dmuond::client::Session;

absl::Status LiveUntil(Session& session, int32_t world, const std::string& phase) {
  if (phase == "open") return absl::OkStatus();
  LayoutBuilder builder(world);
  builder.AddGroup({.preset = "torch"});
  builder.Add({.name = "matrix", .shape = {8, 16}});
  absl::Status status = session.Register(*builder.Build()).status();
  if (!status.ok() || phase == "registered") return status;
  status = session.Attach();
  if (!status.ok() || phase == "attached") return status;
  std::ranges::fill(session.Weight<float>(0), 0.5F);
  status = session.Push();
  if (!status.ok() || phase == "pushed") return status;
  std::ranges::fill(session.Gradient<float>(0), 0.25F);
  return session
      .Submit({.groups = {{.learning_rate = 0.1}}}, {.wait = std::chrono::milliseconds(0)})
      .status();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) return 2;
  const int32_t world = std::atoi(argv[3]);
  auto session =
      Session::Open({.address = argv[1], .rank = std::atoi(argv[2]), .world_size = world});
  if (!session.ok()) {
    std::cerr << session.status() << "\n";
    return 1;
  }
  const absl::Status status = LiveUntil(**session, world, argv[4]);
  if (!status.ok()) {
    std::cerr << status << "\n";
    return 1;
  }
  for (;;) ::pause();
}
