#include "server/storage/restore.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/status_macros.h"
#include "scheduler/unit.h"

namespace dmuond::server::storage {
namespace {

using scheduler::Box;
using scheduler::RestorePart;
using scheduler::StridedView;

// Where the part of a saved tensor goes. Rows of the part are consecutive in both memories.
class Scatter {
 public:
  Scatter(const Box& saved, const Box& unit, const Box& part, std::span<float> to)
      : from_view_(scheduler::ViewInBox(saved, part)),
        to_view_(scheduler::ViewInBox(unit, part)),
        to_(to) {
    // Dimensions at the end that lie without gaps in both are one row.
    run_ = 1;
    dims_ = from_view_.shape.size();
    while (dims_ > 0 && from_view_.strides[dims_ - 1] == run_ &&
           to_view_.strides[dims_ - 1] == run_) {
      run_ *= from_view_.shape[--dims_];
    }
    for (size_t d = 0; d < dims_; ++d) rows_ *= from_view_.shape[d];
  }

  // Takes the tensor's next values, from `first` on. Values come in order.
  void Take(int64_t first, std::span<const float> values) {
    const int64_t end = first + static_cast<int64_t>(values.size());
    for (; row_ < rows_; ++row_) {
      const auto [from, to] = RowAt(row_);
      const int64_t begin = std::max(from, first);
      const int64_t stop = std::min(from + run_, end);
      if (begin < stop) {
        std::memcpy(to_.data() + to + (begin - from), values.data() + (begin - first),
                    (stop - begin) * sizeof(float));
      }
      if (from + run_ > end) return;  // the rest of the row comes next
    }
  }

 private:
  struct Offsets {
    int64_t from;
    int64_t to;
  };
  [[nodiscard]] Offsets RowAt(int64_t row) const {
    Offsets at{from_view_.offset_elements, to_view_.offset_elements};
    for (size_t d = dims_; d-- > 0;) {
      const int64_t index = row % from_view_.shape[d];
      row /= from_view_.shape[d];
      at.from += index * from_view_.strides[d];
      at.to += index * to_view_.strides[d];
    }
    return at;
  }

  StridedView from_view_;
  StridedView to_view_;
  std::span<float> to_;
  int64_t run_ = 1;
  size_t dims_ = 0;  // outside the row
  int64_t rows_ = 1;
  int64_t row_ = 0;
};

}  // namespace

absl::Status Restore(SnapshotReader& reader, const std::vector<scheduler::SavedUnit>& saved,
                     const scheduler::Plan& plan, std::span<const RestorePart> parts,
                     RestoreTarget target) {
  while (!parts.empty()) {
    const int32_t source = parts.front().saved;
    size_t count = 0;
    while (count < parts.size() && parts[count].saved == source) ++count;
    for (StateTensor kind : TensorsOf(saved[source].kind)) {
      std::vector<Scatter> scatters;
      for (const RestorePart& part : parts.first(count)) {
        ASSIGN_OR_RETURN(std::span<float> to, target(part.unit, kind));
        scatters.emplace_back(saved[source].box, plan.units[part.unit.value()].box, part.part, to);
      }
      RETURN_IF_ERROR(
          reader.Read(source, kind, [&](int64_t offset, std::span<const std::byte> data) {
            const std::span<const float> values(reinterpret_cast<const float*>(data.data()),
                                                data.size() / sizeof(float));
            for (Scatter& scatter : scatters) {
              scatter.Take(offset / static_cast<int64_t>(sizeof(float)), values);
            }
          }));
    }
    parts = parts.subspan(count);
  }
  return absl::OkStatus();
}

}  // namespace dmuond::server::storage
