#include "scheduler/clip.h"

#include <cmath>
#include <limits>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/scheduler/step_group.h"

namespace dmuond::scheduler {
namespace {

using testing::AdamW;
using ::testing::HasSubstr;
using testing::Muon;
using testing::World;

// Units of one AdamW tensor that are cut in the middle of blocks.
Plan CutTensor(const std::vector<int64_t>& cuts) {
  Plan plan;
  for (size_t i = 0; i + 1 < cuts.size(); ++i) {
    Unit unit;
    unit.id = UnitId(static_cast<int32_t>(i));
    unit.kind = UnitKind::kPiece;
    unit.box = {{cuts[i]}, {cuts[i + 1]}};
    unit.first_element = cuts[i];
    unit.flat = true;
    plan.units.push_back(unit);
  }
  return plan;
}
