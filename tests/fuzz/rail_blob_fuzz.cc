// What a lane of another node says of where it is found: the first byte is the reader's rank, the
// second the length of an address. What is read is of that length, and lies in the blob.
#include <cstdint>
#include <string>
#include <vector>

#include "server/lane/rail_blob.h"
#include "tests/fuzz/reached.h"
#include "tests/fuzz/require.h"

namespace dmuond::server::lane {
namespace {

Reached reached(1000, {"addresses", "nothing"});

void Read(absl::string_view blob, int rank, size_t bytes) {
  const auto address = ReadAddress(blob, rank, bytes);
  ++reached[address.has_value() ? "addresses" : "nothing"];
  if (!address.has_value()) return;
  testing::Require(address->size() == bytes);
  testing::Require(blob.find(absl::string_view(address->data(), bytes)) != blob.npos);
}

// Who writes as lanes do is understood, whatever the addresses are.
void WriteAndRead(absl::string_view address, int rank) {
  std::string blob;
  const std::vector<char> own(address.begin(), address.end());
  for (int member = 0; member <= rank; ++member) {
    AppendAddress(member == rank ? own : std::vector<char>(member % 3), blob);
  }
  testing::Require(ReadAddress(blob, rank, own.size()) == own);
  blob.pop_back();
  testing::Require(!ReadAddress(blob, rank, own.size()).has_value());
}

}  // namespace
}  // namespace dmuond::server::lane

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  dmuond::server::lane::reached.NextInput();
  const absl::string_view blob(reinterpret_cast<const char*>(data) + 2, size - 2);
  dmuond::server::lane::Read(blob, data[0], data[1]);
  dmuond::server::lane::WriteAndRead(blob, data[0] % 16);
  return 0;
}
