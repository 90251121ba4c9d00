// A cost table out of nowhere: it is refused, or the planner can compute with it, and it is the
// same when it was written and read again.
#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/unique_fd.h"
#include "scheduler/convert/convert.h"
#include "scheduler/cost_model.h"
#include "server/cost_file.h"
#include "tests/fuzz/require.h"

namespace {

using dmuond::scheduler::CostModel;
using dmuond::scheduler::CostTable;
using dmuond::scheduler::MatrixKind;
using dmuond::testing::Require;

// A file without a name, which is read by its descriptor.
class File {
 public:
  File() : fd_(::memfd_create("cost_table", MFD_CLOEXEC)) { Require(fd_.valid()); }
  void Fill(const uint8_t* data, size_t size) {
    Require(::ftruncate(fd_.get(), 0) == 0);
    Require(::pwrite(fd_.get(), data, size, 0) == static_cast<ssize_t>(size));
  }
  [[nodiscard]] std::string path() const { return absl::StrCat("/proc/self/fd/", fd_.get()); }

 private:
  dmuond::wire::UniqueFd fd_;
};

void ComputeWith(const CostTable& table) {
  const CostModel model(table);
  for (const int64_t rows : {int64_t{1}, int64_t{96}, int64_t{4096}, int64_t{1} << 20}) {
    const MatrixKind matrix{rows, 1024, {}};
    double before = 0;
    for (const int32_t batch : {1, 2, 3, 8, 100}) {
      const double time = model.MatrixBatch(matrix, batch);
      Require(std::isfinite(time) && time >= before);
      before = time;
    }
  }
  Require(std::isfinite(model.Piece(1)) && std::isfinite(model.Piece(int64_t{1} << 40)));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static auto& file = *new File;
  file.Fill(data, size);
  const auto table = dmuond::server::ReadCostTable(file.path());
  if (!table.ok()) return 0;
  ComputeWith(*table);
  static auto& written = *new File;
  written.Fill(nullptr, 0);
  Require(dmuond::server::WriteCostTable(*table, written.path()).ok());
  const auto again = dmuond::server::ReadCostTable(written.path());
  Require(again.ok());
  Require(dmuond::ToProto(*again).SerializeAsString() ==
          dmuond::ToProto(*table).SerializeAsString());
  return 0;
}
