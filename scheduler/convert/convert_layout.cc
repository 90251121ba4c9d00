// Layout: registrations, the inputs of the plan, the routing table.
#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "google/protobuf/util/message_differencer.h"
#include "scheduler/convert/convert.h"
#include "scheduler/convert/difference.h"
#include "scheduler/convert/registrations.h"
#include "scheduler/reason.h"

namespace dmuond {
namespace {

using google::protobuf::util::MessageDifferencer;
using scheduler::Named;
using scheduler::Say;

// Says whose number is wrong.
struct Where {
  int32_t rank;
  const std::string& parameter;
  [[nodiscard]] absl::Status Refuse(const scheduler::Message& what) const {
    return scheduler::Error(absl::StatusCode::kInvalidArgument, "LAYOUT_INVALID",
                            Say("trainer ", Named("rank", rank), ", parameter \"",
                                Named("parameter", parameter), "\": ", what));
  }
  [[nodiscard]] absl::Status UnknownValue(const char* field, int value) const {
    return Refuse(Say(Named("field", field), " has the unknown value ", Named("value", value)));
  }
};

absl::Status CopyExtents(const Where& where, const char* field,
                         const google::protobuf::RepeatedField<int64_t>& from,
                         scheduler::Extents& to) {
  if (from.size() > scheduler::kDimsMax) {
    return where.Refuse(Say(Named("field", field), " has ", Named("dimensions", from.size()),
                            " dimensions, at most ", scheduler::kDimsMax, " are possible"));
  }
  to.assign(from.begin(), from.end());
  return absl::OkStatus();
}

bool Known(v1::ElementType type) {
  return type == v1::ELEMENT_TYPE_FLOAT32 || type == v1::ELEMENT_TYPE_BFLOAT16 ||
         type == v1::ELEMENT_TYPE_FLOAT16;
}
static_assert(static_cast<int>(scheduler::ElementType::kF32) == v1::ELEMENT_TYPE_FLOAT32);
static_assert(static_cast<int>(scheduler::ElementType::kBF16) == v1::ELEMENT_TYPE_BFLOAT16);
static_assert(static_cast<int>(scheduler::ElementType::kF16) == v1::ELEMENT_TYPE_FLOAT16);
static_assert(static_cast<int>(scheduler::Route::kMuon) == v1::ROUTE_MUON);
static_assert(static_cast<int>(scheduler::Route::kAdamW) == v1::ROUTE_ADAMW);
static_assert(static_cast<int>(scheduler::Route::kTrainer) == v1::ROUTE_TRAINER);
static_assert(static_cast<int>(scheduler::Contribution::kSum) == v1::CONTRIBUTION_SUM);
static_assert(static_cast<int>(scheduler::Contribution::kSame) == v1::CONTRIBUTION_SAME);
static_assert(static_cast<int>(scheduler::Contribution::kNone) == v1::CONTRIBUTION_NONE);
static_assert(static_cast<int>(scheduler::MatrixView::Kind::kWhole) == v1::MatrixView::KIND_WHOLE);
static_assert(static_cast<int>(scheduler::MatrixView::Kind::kRowBlocks) ==
              v1::MatrixView::KIND_ROW_BLOCKS);
static_assert(static_cast<int>(scheduler::MatrixView::Kind::kHeads) == v1::MatrixView::KIND_HEADS);

absl::StatusOr<scheduler::Parameter> ToParameter(int32_t rank, const v1::Parameter& parameter) {
  const Where where{rank, parameter.name()};
  scheduler::Parameter out;
  out.name = parameter.name();
  if (absl::Status status = CopyExtents(where, "shape", parameter.shape(), out.shape);
      !status.ok()) {
    return status;
  }
  if (parameter.route() < v1::ROUTE_MUON || parameter.route() > v1::ROUTE_TRAINER) {
    return where.UnknownValue("route", parameter.route());
  }
  out.route = static_cast<scheduler::Route>(parameter.route());
  // The daemon never touches a parameter that the trainer keeps: it may have any type.
  const bool ours = out.route != scheduler::Route::kTrainer;
  if (Known(parameter.weight_type())) {
    out.weight_type = static_cast<scheduler::ElementType>(parameter.weight_type());
  } else if (ours) {
    return where.UnknownValue("weight_type", parameter.weight_type());
  }
  if (Known(parameter.gradient_type())) {
    out.gradient_type = static_cast<scheduler::ElementType>(parameter.gradient_type());
  } else if (ours) {
    return where.UnknownValue("gradient_type", parameter.gradient_type());
  }
  out.route_reason = parameter.route_reason();
  if (parameter.view().kind() < v1::MatrixView::KIND_UNSPECIFIED ||
      parameter.view().kind() > v1::MatrixView::KIND_HEADS) {
    return where.UnknownValue("view.kind", parameter.view().kind());
  }
  if (parameter.view().kind() != v1::MatrixView::KIND_UNSPECIFIED) {
    out.view.kind = static_cast<scheduler::MatrixView::Kind>(parameter.view().kind());
  }
  out.view.row_blocks.assign(parameter.view().row_blocks().begin(),
                             parameter.view().row_blocks().end());
  out.view.heads = parameter.view().heads();
  out.group = parameter.group();
  out.reduce_factor = parameter.reduce_factor();
  out.ready_order = parameter.ready_order();
  out.held_by_all = parameter.held_by_all();
  return out;
}

absl::Status ToSlice(const Where& where, const char* field, const v1::Slice& slice,
                     scheduler::Slice& out) {
  out.arena = slice.arena();
  out.offset_bytes = slice.offset_bytes();
  return CopyExtents(where, field, slice.strides(), out.strides);
}

absl::StatusOr<scheduler::Fragment> ToFragment(const v1::Registration& registration,
                                               const v1::Fragment& fragment) {
  if (fragment.parameter() < 0 || fragment.parameter() >= registration.parameters_size()) {
    return scheduler::Error(
        absl::StatusCode::kInvalidArgument, "LAYOUT_INVALID",
        Say("trainer ", Named("rank", registration.rank()), ": a fragment names parameter ",
            Named("parameter", fragment.parameter()), " of ",
            Named("parameters", registration.parameters_size())));
  }
  const v1::Parameter& parameter = registration.parameters(fragment.parameter());
  const Where where{registration.rank(), parameter.name()};
  scheduler::Fragment out;
  out.rank = scheduler::TrainerRank(registration.rank());
  out.parameter = fragment.parameter();
  absl::StatusOr<scheduler::Box> box = FromProto(fragment.box());
  if (!box.ok()) return where.Refuse(Say(box.status().message()));
  out.box = *std::move(box);
  if (fragment.contribution() >= v1::CONTRIBUTION_SUM &&
      fragment.contribution() <= v1::CONTRIBUTION_NONE) {
    out.contribution = static_cast<scheduler::Contribution>(fragment.contribution());
  } else if (parameter.route() != v1::ROUTE_TRAINER) {
    return where.UnknownValue("contribution", fragment.contribution());
  }
  absl::Status status = ToSlice(where, "gradient.strides", fragment.gradient(), out.gradient);
  if (status.ok()) status = ToSlice(where, "weight.strides", fragment.weight(), out.weight);
  if (!status.ok()) return status;
  return out;
}

template <typename Numbers>
void AddAll(const Numbers& from, google::protobuf::RepeatedField<int64_t>* to) {
  to->Add(from.begin(), from.end());
}

// What all trainers must say alike besides their parameters.
absl::Status CheckAlike(const v1::Registration& first, int32_t first_rank,
                        const v1::Registration& other, int32_t other_rank) {
  const auto differ = [&](const std::string& field, const auto& a, const auto& b) {
    return scheduler::Error(
        absl::StatusCode::kInvalidArgument, "LAYOUT_DIFFERS",
        Say("trainers ", Named("rank", first_rank), " and ", Named("other_rank", other_rank),
            " registered different ", Named("field", field), ": ", Named("value", a), " and ",
            Named("other_value", b)));
  };
  if (first.world_size() != other.world_size()) {
    return differ("world_size", first.world_size(), other.world_size());
  }
  if (first.bucket_bytes() != other.bucket_bytes()) {
    return differ("bucket_bytes", first.bucket_bytes(), other.bucket_bytes());
  }
  if (first.groups_size() != other.groups_size()) {
    return differ("numbers of groups", first.groups_size(), other.groups_size());
  }
  for (int i = 0; i < first.groups_size(); ++i) {
    if (!MessageDifferencer::Equals(first.groups(i), other.groups(i))) {
      const auto [field, one, another] = FirstDifference(first.groups(i), other.groups(i));
      return differ(absl::StrCat("groups[", i, "].", field), one, another);
    }
  }
  return absl::OkStatus();
}

// Converts, checks and merges the registrations of a plan's inputs, by rank. Of a class one value
// is made, into which the numbers of one rank after the other are put.
class RegistrationsReader {
 public:
  explicit RegistrationsReader(const v1::PlanInputs& inputs)
      : inputs_(inputs), merger_(AnyOf(inputs).world_size()) {}

  absl::Status Run(scheduler::Layout& layout) {
    std::vector<Who> all;
    int64_t fragments = 0;
    for (int i = 0; i < inputs_.registrations_size(); ++i) {
      fragments += inputs_.registrations(i).fragments_size();
      all.push_back({inputs_.registrations(i).rank(), -1, i});
    }
    for (int c = 0; c < inputs_.classes_size(); ++c) {
      absl::StatusOr<ClassReader> reader = ClassReader::Make(inputs_.classes(c));
      if (!reader.ok()) return reader.status();
      fragments += int64_t{reader->size()} * reader->common().fragments_size();
      for (int32_t m = 0; m < reader->size(); ++m) all.push_back({reader->rank(m), c, m});
      classes_.push_back({.reader = *std::move(reader)});
    }
    if (all.size() > static_cast<size_t>(scheduler::kWorldMax)) {
      return absl::InvalidArgumentError(absl::StrCat(all.size(), " registrations; at most ",
                                                     scheduler::kWorldMax, " are possible"));
    }
    if (fragments > scheduler::kJobFragmentsMax) {
      return scheduler::Error(
          absl::StatusCode::kInvalidArgument, "LAYOUT_INVALID",
          Say("the trainers register ", Named("fragments", fragments), " fragments; at most ",
              Named("at_most", scheduler::kJobFragmentsMax), " are allowed in a job"));
    }
    std::stable_sort(all.begin(), all.end(),
                     [](const Who& a, const Who& b) { return a.rank < b.rank; });
    for (const Who& who : all) {
      absl::Status added = who.of_class < 0 ? Add(inputs_.registrations(who.index))
                                            : Add(classes_[who.of_class], who.index);
      if (!added.ok()) return added;
    }
    return merger_.Finish(layout);
  }

 private:
  struct Who {
    int32_t rank = 0;
    int32_t of_class = -1;  // -1: of none
    int32_t index = 0;      // into registrations, or of the class's members
  };
  struct Class {
    ClassReader reader;
    scheduler::Registration registration;  // of the member that was added last
    std::vector<int64_t*> numbers;         // in `registration`
    std::vector<int32_t> parameters;       // their indices in the layout
  };

  absl::StatusOr<scheduler::Registration> Convert(const v1::Registration& wire, int32_t rank) {
    if (first_ == nullptr) {
      first_ = &wire;
      first_rank_ = rank;
    }
    if (absl::Status alike = CheckAlike(*first_, first_rank_, wire, rank); !alike.ok()) {
      return alike;
    }
    absl::StatusOr<scheduler::Registration> converted = FromProto(wire);
    if (!converted.ok()) return converted.status();
    for (const scheduler::Parameter& parameter : converted->parameters) {
      if (parameter.route == scheduler::Route::kTrainer) continue;
      if (parameter.group < 0 || parameter.group >= wire.groups_size()) {
        return Where{rank, parameter.name}.Refuse(Say("group ", Named("group", parameter.group),
                                                      " of ", Named("groups", wire.groups_size()),
                                                      " groups"));
      }
    }
    return converted;
  }

  absl::Status Add(const v1::Registration& wire) {
    absl::StatusOr<scheduler::Registration> registration = Convert(wire, wire.rank());
    if (!registration.ok()) return registration.status();
    if (absl::Status valid = Validate(*registration); !valid.ok()) return valid;
    return merger_.Add(*registration).status();
  }

  absl::Status Add(Class& of, int32_t member) {
    if (member == 0) {
      absl::StatusOr<scheduler::Registration> registration =
          Convert(of.reader.common(), of.reader.rank(0));
      if (!registration.ok()) return registration.status();
      of.registration = *std::move(registration);
      of.numbers = NumbersIn(of.reader.common(), of.registration);
    }
    scheduler::Registration& registration = of.registration;
    registration.rank = scheduler::TrainerRank(of.reader.rank(member));
    registration.node = scheduler::NodeRank(of.reader.node(member));
    registration.home = scheduler::LaneIndex(of.reader.home_lane(member));
    for (scheduler::Fragment& fragment : registration.fragments) fragment.rank = registration.rank;
    for (size_t i = 0; i < of.numbers.size(); ++i) *of.numbers[i] = of.reader.number(member, i);
    absl::Status valid = member == 0 ? Validate(registration) : ValidateFragments(registration);
    if (!valid.ok()) return valid;
    if (member > 0) {
      merger_.AddLike(of.parameters, registration);
      return absl::OkStatus();
    }
    absl::StatusOr<std::vector<int32_t>> parameters = merger_.Add(registration);
    if (!parameters.ok()) return parameters.status();
    of.parameters = *std::move(parameters);
    return absl::OkStatus();
  }

  const v1::PlanInputs& inputs_;
  scheduler::RegistrationMerger merger_;
  std::vector<Class> classes_;
  const v1::Registration* first_ = nullptr;  // of the lowest rank: what others must say too
  int32_t first_rank_ = 0;
};

}  // namespace

kernels::DType ToDType(scheduler::ElementType type) { return static_cast<kernels::DType>(type); }
static_assert(static_cast<int>(scheduler::ElementType::kF32) ==
              static_cast<int>(kernels::DType::kF32));
static_assert(static_cast<int>(scheduler::ElementType::kBF16) ==
              static_cast<int>(kernels::DType::kBF16));
static_assert(static_cast<int>(scheduler::ElementType::kF16) ==
              static_cast<int>(kernels::DType::kF16));

v1::Slice ToProto(const scheduler::Slice& slice) {
  v1::Slice out;
  out.set_arena(slice.arena);
  out.set_offset_bytes(slice.offset_bytes);
  AddAll(slice.strides, out.mutable_strides());
  return out;
}

v1::Box ToProto(const scheduler::Box& box) {
  v1::Box out;
  AddAll(box.begin, out.mutable_begin());
  AddAll(box.end, out.mutable_end());
  return out;
}

absl::StatusOr<scheduler::Box> FromProto(const v1::Box& box) {
  if (box.begin_size() != box.end_size() || box.begin_size() > scheduler::kDimsMax) {
    return absl::InvalidArgumentError(absl::StrCat("a box has ", box.begin_size(), " begins and ",
                                                   box.end_size(), " ends; at most ",
                                                   scheduler::kDimsMax, " of each are possible"));
  }
  scheduler::Box out;
  out.begin.assign(box.begin().begin(), box.begin().end());
  out.end.assign(box.end().begin(), box.end().end());
  return out;
}

absl::StatusOr<scheduler::Registration> FromProto(const v1::Registration& registration) {
  if (registration.home_lane() < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("trainer ", registration.rank(), ": home_lane is ", registration.home_lane()));
  }
  scheduler::Registration out;
  out.rank = scheduler::TrainerRank(registration.rank());
  out.node = scheduler::NodeRank(registration.node());
  out.home = scheduler::LaneIndex(registration.home_lane());
  out.parameters.reserve(registration.parameters_size());
  for (const v1::Parameter& parameter : registration.parameters()) {
    absl::StatusOr<scheduler::Parameter> converted = ToParameter(registration.rank(), parameter);
    if (!converted.ok()) return converted.status();
    out.parameters.push_back(*std::move(converted));
  }
  out.fragments.reserve(registration.fragments_size());
  for (const v1::Fragment& fragment : registration.fragments()) {
    absl::StatusOr<scheduler::Fragment> converted = ToFragment(registration, fragment);
    if (!converted.ok()) return converted.status();
    out.fragments.push_back(*std::move(converted));
  }
  return out;
}

v1::Registration ToProto(const scheduler::Registration& registration) {
  v1::Registration out;
  out.set_rank(registration.rank.value());
  out.set_node(registration.node.value());
  out.set_home_lane(registration.home.value());
  for (const scheduler::Parameter& parameter : registration.parameters) {
    v1::Parameter& to = *out.add_parameters();
    to.set_name(parameter.name);
    AddAll(parameter.shape, to.mutable_shape());
    to.set_weight_type(static_cast<v1::ElementType>(parameter.weight_type));
    to.set_gradient_type(static_cast<v1::ElementType>(parameter.gradient_type));
    to.set_route(static_cast<v1::Route>(parameter.route));
    to.set_route_reason(parameter.route_reason);
    to.mutable_view()->set_kind(static_cast<v1::MatrixView::Kind>(parameter.view.kind));
    AddAll(parameter.view.row_blocks, to.mutable_view()->mutable_row_blocks());
    to.mutable_view()->set_heads(parameter.view.heads);
    to.set_group(parameter.group);
    to.set_reduce_factor(parameter.reduce_factor);
    to.set_ready_order(parameter.ready_order);
    to.set_held_by_all(parameter.held_by_all);
  }
  for (const scheduler::Fragment& fragment : registration.fragments) {
    v1::Fragment& to = *out.add_fragments();
    to.set_parameter(fragment.parameter);
    *to.mutable_box() = ToProto(fragment.box);
    to.set_contribution(static_cast<v1::Contribution>(fragment.contribution));
    *to.mutable_gradient() = ToProto(fragment.gradient);
    *to.mutable_weight() = ToProto(fragment.weight);
  }
  return out;
}

scheduler::CostTable FromProto(const v1::CostTable& costs) {
  scheduler::CostTable out;
  out.device = costs.device();
  for (const v1::CostTable::Entry& entry : costs.entries()) {
    scheduler::Iteration iteration;
    if (entry.steps() != 0) iteration.steps = entry.steps();
    if (entry.rounds() != 0) iteration.rounds = entry.rounds();
    out.entries.push_back(
        {{entry.rows(), entry.cols(), iteration}, entry.batch(), entry.microseconds()});
  }
  for (const v1::CostTable::Choice& choice : costs.choices()) {
    out.choices.push_back(
        {choice.rows(), choice.cols(), static_cast<scheduler::ElementType>(choice.dtype()),
         static_cast<uint8_t>(choice.engine()), static_cast<uint8_t>(choice.form())});
  }
  // An unset rate is the analytic default's.
  if (costs.tflops() > 0) out.tflops = costs.tflops();
  if (costs.gigabytes_per_second() > 0) out.gigabytes_per_second = costs.gigabytes_per_second();
  if (costs.launch_us() > 0) out.launch_us = costs.launch_us();
  return out;
}

v1::CostTable ToProto(const scheduler::CostTable& costs) {
  v1::CostTable out;
  out.set_device(costs.device);
  for (const scheduler::CostEntry& entry : costs.entries) {
    v1::CostTable::Entry& to = *out.add_entries();
    to.set_rows(entry.matrix.rows);
    to.set_cols(entry.matrix.cols);
    to.set_steps(entry.matrix.iteration.steps);
    to.set_rounds(entry.matrix.iteration.rounds);
    to.set_batch(entry.batch);
    to.set_microseconds(entry.microseconds);
  }
  for (const scheduler::ShapeChoice& choice : costs.choices) {
    v1::CostTable::Choice& to = *out.add_choices();
    to.set_rows(choice.rows);
    to.set_cols(choice.cols);
    to.set_dtype(static_cast<v1::ElementType>(choice.dtype));
    to.set_engine(static_cast<v1::CostTable::Engine>(choice.engine));
    to.set_form(static_cast<v1::GroupConfig::Form>(choice.form));
  }
  out.set_tflops(costs.tflops);
  out.set_gigabytes_per_second(costs.gigabytes_per_second);
  out.set_launch_us(costs.launch_us);
  return out;
}

absl::StatusOr<scheduler::PlanInputs> FromProto(const v1::PlanInputs& inputs) {
  if (inputs.nodes() < 1 || inputs.lanes_per_node() < 1) {
    return absl::InvalidArgumentError(absl::StrCat("a plan for ", inputs.nodes(), " nodes of ",
                                                   inputs.lanes_per_node(), " lanes"));
  }
  if (WorldSizeOf(inputs) == 0) {
    return absl::InvalidArgumentError("a plan without registrations");
  }
  const v1::Registration& first = AnyOf(inputs);
  scheduler::PlanInputs out;
  absl::Status merged = RegistrationsReader(inputs).Run(out.layout);
  if (!merged.ok()) return merged;
  out.nodes = inputs.nodes();
  out.lanes_per_node = inputs.lanes_per_node();
  out.lane_memory_bytes = inputs.lane_memory_bytes();
  out.landing_bytes_max = inputs.landing_bytes_max();
  if (inputs.memory_granule_bytes() != 0) out.memory_granule_bytes = inputs.memory_granule_bytes();
  if (first.bucket_bytes() != 0) out.bucket_bytes = first.bucket_bytes();
  out.costs = FromProto(inputs.costs());
  for (int i = 0; i < first.groups_size(); ++i) {
    absl::StatusOr<kernels::MuonConfig> config = FromProto(first.groups(i));
    if (!config.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat("groups[", i, "]: ", std::string(config.status().message())));
    }
    out.iterations.push_back(IterationOf(config->newton_schulz));
  }
  return out;
}

v1::RoutingRow ToProto(const scheduler::RoutingRow& row, int32_t bucket) {
  v1::RoutingRow out;
  out.set_parameter(row.parameter);
  out.set_route(static_cast<v1::Route>(row.route));
  out.set_matrices(static_cast<int32_t>(row.matrices));
  for (scheduler::LaneId owner : row.owners) out.add_owners(owner.value());
  out.set_why(row.why);
  out.set_bucket(bucket);
  return out;
}

std::vector<v1::RoutingRow> RoutingRows(const scheduler::Layout& layout,
                                        const scheduler::Plan& plan) {
  const std::vector<scheduler::RoutingRow> table = scheduler::RoutingTable(layout, plan);
  std::vector<v1::RoutingRow> rows;
  rows.reserve(table.size());
  for (size_t i = 0; i < table.size(); ++i) {
    rows.push_back(ToProto(table[i], plan.parameter_bucket[i]));
  }
  return rows;
}

}  // namespace dmuond
