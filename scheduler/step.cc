#include "scheduler/step.h"

#include <bit>

#include "absl/strings/str_cat.h"

namespace dmuond::scheduler {
namespace {

bool SameBits(double a, double b) {
  return std::bit_cast<uint64_t>(a) == std::bit_cast<uint64_t>(b);
}

struct GroupField {
  const char* name;
  double GroupScalars::*member;
};
constexpr GroupField kGroupFields[] = {
    {"learning_rate", &GroupScalars::learning_rate},
    {"weight_decay", &GroupScalars::weight_decay},
    {"momentum", &GroupScalars::momentum},
    {"beta1", &GroupScalars::beta1},
    {"beta2", &GroupScalars::beta2},
    {"eps", &GroupScalars::eps},
};

}  // namespace

void Append(BucketRuns& runs, const BucketRun& run) {
  if (!runs.empty() && runs.back().end() == run.first) {
    runs.back().count += run.count;
  } else {
    runs.push_back(run);
  }
}

void Append(BucketRuns& runs, const BucketRuns& more) {
  for (const BucketRun& run : more) Append(runs, run);
}

std::optional<ScalarMismatch> Compare(const StepScalars& a, const StepScalars& b) {
  if (a.groups.size() != b.groups.size()) {
    return ScalarMismatch{"groups.size", static_cast<double>(a.groups.size()),
                          static_cast<double>(b.groups.size())};
  }
  for (size_t g = 0; g < a.groups.size(); ++g) {
    for (const GroupField& field : kGroupFields) {
      const double x = a.groups[g].*field.member;
      const double y = b.groups[g].*field.member;
      if (!SameBits(x, y)) {
        return ScalarMismatch{absl::StrCat("groups[", g, "].", field.name), x, y};
      }
    }
  }
  if (!SameBits(a.loss_scale, b.loss_scale)) {
    return ScalarMismatch{"loss_scale", a.loss_scale, b.loss_scale};
  }
  if (!SameBits(a.max_grad_norm, b.max_grad_norm)) {
    return ScalarMismatch{"max_grad_norm", a.max_grad_norm, b.max_grad_norm};
  }
  if (a.clip_muon != b.clip_muon) {
    return ScalarMismatch{"clip_muon", a.clip_muon ? 1.0 : 0.0, b.clip_muon ? 1.0 : 0.0};
  }
  return std::nullopt;
}

}  // namespace dmuond::scheduler
