#include "server/storage/tensor_name.h"

#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace dmuond::server::storage {
namespace {

constexpr std::array<std::pair<StateTensor, const char*>, 5> kNames = {{
    {StateTensor::kMaster, "master"},
    {StateTensor::kMomentum, "momentum"},
    {StateTensor::kExpAvg, "exp_avg"},
    {StateTensor::kExpAvgSq, "exp_avg_sq"},
    {StateTensor::kUpdates, "updates"},
}};
constexpr std::array<StateTensor, 2> kMatrix = {StateTensor::kMomentum, StateTensor::kMaster};
constexpr std::array<StateTensor, 3> kPiece = {StateTensor::kExpAvg, StateTensor::kExpAvgSq,
                                               StateTensor::kMaster};

bool ParseExtent(absl::string_view text, int64_t& value) {
  // One spelling for each number: no sign, no leading zero, no blank.
  return absl::SimpleAtoi(text, &value) && value >= 0 && absl::StrCat(value) == text;
}

// "0:5,0:1024"
std::optional<scheduler::Box> ParseBox(absl::string_view text) {
  scheduler::Box box;
  for (const absl::string_view range : absl::StrSplit(text, ',')) {
    const std::vector<absl::string_view> ends = absl::StrSplit(range, ':');
    int64_t begin = 0;
    int64_t end = 0;
    if (ends.size() != 2 || !ParseExtent(ends[0], begin) || !ParseExtent(ends[1], end) ||
        begin >= end || box.begin.size() == scheduler::kDimsMax) {
      return std::nullopt;
    }
    box.begin.push_back(begin);
    box.end.push_back(end);
  }
  return box;
}

}  // namespace

const char* Name(StateTensor kind) {
  for (const auto& [known, name] : kNames) {
    if (known == kind) return name;
  }
  return "?";
}

std::span<const StateTensor> TensorsOf(scheduler::UnitKind kind) {
  if (kind == scheduler::UnitKind::kMatrix) return kMatrix;
  return kPiece;
}

std::string TensorNameOf(const std::string& parameter, const scheduler::Extents& parameter_shape,
                         StateTensor kind, const scheduler::Box& box) {
  std::string name = absl::StrCat(parameter, "/", Name(kind));
  if (box == scheduler::WholeBox(parameter_shape)) return name;
  for (size_t d = 0; d < box.begin.size(); ++d) {
    absl::StrAppend(&name, d == 0 ? "[" : ",", box.begin[d], ":", box.end[d]);
  }
  return name + "]";
}

std::optional<TensorName> ParseTensorName(const std::string& name) {
  TensorName out;
  const size_t slash = name.rfind('/');  // neither kinds nor boxes have one
  if (slash == std::string::npos || slash == 0) return std::nullopt;
  out.parameter = name.substr(0, slash);
  std::string kind = name.substr(slash + 1);
  if (const size_t bracket = kind.find('['); bracket != std::string::npos) {
    if (kind.back() != ']') return std::nullopt;
    out.box = ParseBox(kind.substr(bracket + 1, kind.size() - bracket - 2));
    if (!out.box.has_value()) return std::nullopt;
    kind.resize(bracket);
  }
  for (const auto& [known, text] : kNames) {
    if (kind != text) continue;
    out.kind = known;
    return out;
  }
  return std::nullopt;
}

}  // namespace dmuond::server::storage
