#include "server/storage/layout_check.h"

#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "scheduler/convert/convert.h"
#include "scheduler/digest.h"
#include "scheduler/matrix_view.h"
#include "server/storage/quote.h"

namespace dmuond::server::storage {
namespace {

using Groups = google::protobuf::RepeatedPtrField<v1::GroupConfig>;
using scheduler::Parameter;
using scheduler::Route;

// What the state of one parameter depends on, in the words of a message.
struct Traits {
  std::string route;
  std::string shape;
  std::string matrices;  // muon
  std::string momentum;  // muon
};

// Parameters that the daemon trains, by name: an order that no registration changes.
std::map<std::string, Traits> TraitsOf(const JobLayout& layout) {
  std::map<std::string, Traits> all;
  for (const Parameter& parameter : layout.parameters) {
    if (parameter.route == Route::kTrainer) continue;
    Traits& traits = all[parameter.name];
    traits.route = scheduler::Name(parameter.route);
    traits.shape = scheduler::ShapeToString(parameter.shape);
    if (parameter.route != Route::kMuon) continue;
    traits.matrices = scheduler::ToString(parameter.view);
    traits.momentum =
        layout.momentum[parameter.group] == kernels::MomentumForm::kSum ? "sum" : "ema";
  }
  return all;
}

absl::Status Differ(const std::string& parameter, const char* what, const std::string& snapshot,
                    const std::string& job) {
  return absl::FailedPreconditionError(
      absl::StrCat("the snapshot's layout differs: parameter ", Quote(parameter), " has the ", what,
                   " ", snapshot, " in the snapshot and ", job, " in the job"));
}

absl::Status OnlyIn(const char* where, const char* other, const std::string& parameter) {
  return absl::FailedPreconditionError(
      absl::StrCat("the snapshot's layout differs: parameter ", Quote(parameter),
                   " is trained by the daemon in the ", where, " and not in the ", other));
}

}  // namespace

absl::StatusOr<JobLayout> LayoutOf(const std::vector<Parameter>& parameters, const Groups& groups) {
  JobLayout layout;
  layout.parameters = parameters;
  for (const v1::GroupConfig& group : groups) {
    ASSIGN_OR_RETURN(kernels::MuonConfig config, FromProto(group));
    layout.momentum.push_back(config.momentum);
  }
  for (const Parameter& parameter : parameters) {
    if (parameter.route == Route::kTrainer) continue;
    if (parameter.group < 0 || parameter.group >= layout.momentum.size()) {
      return absl::InvalidArgumentError(absl::StrCat("parameter ", Quote(parameter.name),
                                                     " is in group ", parameter.group, " of ",
                                                     layout.momentum.size()));
    }
  }
  return layout;
}

absl::StatusOr<JobLayout> LayoutOf(const v1::SnapshotManifest& manifest) {
  // Checked as if one trainer registered the parameters and held nothing.
  v1::Registration registration;
  *registration.mutable_parameters() = manifest.parameters();
  ASSIGN_OR_RETURN(scheduler::Registration converted, FromProto(registration));
  RETURN_IF_ERROR(scheduler::Validate(converted));
  return LayoutOf(converted.parameters, manifest.groups());
}

absl::Status SetLayout(const std::vector<Parameter>& parameters, const Groups& groups,
                       v1::SnapshotManifest& manifest) {
  ASSIGN_OR_RETURN(JobLayout layout, LayoutOf(parameters, groups));
  scheduler::Registration registration;
  registration.parameters = parameters;
  manifest.mutable_parameters()->Swap(ToProto(registration).mutable_parameters());
  *manifest.mutable_groups() = groups;
  manifest.set_layout_hash(LayoutHash(layout));
  return absl::OkStatus();
}

std::string LayoutHash(const JobLayout& layout) {
  scheduler::Digest digest;
  for (const auto& [name, traits] : TraitsOf(layout)) {
    digest.Add(name);
    digest.Add(traits.route);
    digest.Add(traits.shape);
    digest.Add(traits.matrices);
    digest.Add(traits.momentum);
  }
  return absl::StrFormat("%016x", digest.value());
}

absl::Status CheckCompatible(const JobLayout& snapshot, const JobLayout& job) {
  const std::map<std::string, Traits> saved = TraitsOf(snapshot);
  const std::map<std::string, Traits> wanted = TraitsOf(job);
  auto a = saved.begin();
  auto b = wanted.begin();
  while (a != saved.end() || b != wanted.end()) {
    if (b == wanted.end() || (a != saved.end() && a->first < b->first)) {
      return OnlyIn("snapshot", "job", a->first);
    }
    if (a == saved.end() || b->first < a->first) return OnlyIn("job", "snapshot", b->first);
    const auto& [name, was] = *a++;
    const Traits& is = (b++)->second;
    if (was.route != is.route) {
      absl::Status differ = Differ(name, "route", was.route, is.route);
      return absl::FailedPreconditionError(absl::StrCat(
          differ.message(), ": to go on, give it the snapshot's, in Python by route=[(\"", name,
          "\", \"", was.route, "\")]"));
    }
    if (was.shape != is.shape) return Differ(name, "shape", was.shape, is.shape);
    if (was.matrices != is.matrices) return Differ(name, "matrices", was.matrices, is.matrices);
    if (was.momentum != is.momentum) {
      return Differ(name, "form of momentum", was.momentum, is.momentum);
    }
  }
  return absl::OkStatus();
}

}  // namespace dmuond::server::storage
