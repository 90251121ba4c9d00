// A manifest out of nowhere whose checksum is right, and names of tensors and directories.
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <string>

#include "server/storage/layout_check.h"
#include "server/storage/manifest.h"
#include "server/storage/tensor_name.h"
#include "tests/server/storage/snapshots.h"

namespace dmuond::server::storage::testing {
namespace {

// Never false; abort() is how a fuzzer hears of it.
void Require(bool condition) {
  if (!condition) std::abort();
}

void TryManifest(std::string text) {
  if (!SealManifest(text).ok()) return;
  const auto manifest = ParseManifest(text);
  if (!manifest.ok()) return;
  Require(CheckManifest(*manifest).ok());
  static const JobLayout* const job = new JobLayout(LayoutOf(MakeJob(1, 1, 1).base).value());
  CheckCompatible(LayoutOf(*manifest).value(), *job).IgnoreError();

  const auto written = EncodeManifest(*manifest);
  Require(written.ok());
  auto again = ParseManifest(*written);
  Require(again.ok());
  again->set_checksum(manifest->checksum());
  Require(again->SerializeAsString() == manifest->SerializeAsString());
}

void TryNames(const std::string& name) {
  if (const std::optional<TensorName> parsed = ParseTensorName(name)) {
    // No box is the whole of a scalar's shape but the one without dimensions.
    scheduler::Box box;
    if (parsed->box.has_value()) box = *parsed->box;
    Require(TensorNameOf(parsed->parameter, {}, parsed->kind, box) == name);
  }
  if (const std::optional<SnapshotId> id = ParseDirectoryName(name)) {
    Require(DirectoryName(*id) == name);
  }
  if (IsFileName(name)) Require(name.find('/') == std::string::npos);
}

}  // namespace
}  // namespace dmuond::server::storage::testing

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  dmuond::server::storage::testing::TryManifest(text);
  dmuond::server::storage::testing::TryNames(text);
  return 0;
}
