#include "scheduler/job/outgoing_goes.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <tuple>

#include "scheduler/convert/convert.h"

namespace dmuond::scheduler {
namespace {

// Of the gathering time: how long a GO waits for others of the same round.
constexpr int32_t kRoundParts = 20;

bool SameStream(const Go& a, const Go& b) {
  return std::tie(a.attempt, a.rail, a.operation, a.kind) ==
         std::tie(b.attempt, b.rail, b.operation, b.kind);
}

std::vector<bool> PartsOf(const RailTables& tables, NodeRank node) {
  std::vector<bool> parts;
  for (const RailTable* table : {&tables.partials, &tables.weights, &tables.adopts}) {
    for (const std::vector<NodeSet>& rail : *table) {
      for (const NodeSet& nodes : rail) parts.push_back(nodes.contains(node));
    }
  }
  return parts;
}

}  // namespace

OutgoingGoes::OutgoingGoes(const RailTables& tables, int32_t nodes) : tables_(tables) {
  std::map<std::vector<bool>, std::vector<int32_t>> by_parts;
  for (int32_t node = 0; node < nodes; ++node) {
    by_parts[PartsOf(tables, NodeRank(node))].push_back(node);
  }
  for (auto& [parts, alike] : by_parts) {
    if (std::none_of(parts.begin(), parts.end(), [](bool part) { return part; })) continue;
    const bool all = static_cast<int32_t>(alike.size()) == nodes;
    alike_.push_back({std::move(alike), all});
  }
}

void OutgoingGoes::Add(TimePoint now, std::chrono::microseconds gather, Go go) {
  TimePoint due = now + gather / kRoundParts;
  if (sent_.has_value()) due = std::max(due, *sent_ + kGatherMin);
  if (go.last || gather.count() == 0) due = now;
  due_ = std::min(due_.value_or(due), due);
  const auto same = std::find_if(held_.begin(), held_.end(),
                                 [&](const Go& held) { return SameStream(held, go); });
  if (same == held_.end()) {
    held_.push_back(std::move(go));
    return;
  }
  Append(same->buckets, go.buckets);
  same->absent.insert(same->absent.end(), go.absent.begin(), go.absent.end());
}

AddressedMessages OutgoingGoes::Take(TimePoint now) {
  AddressedMessages out;
  if (held_.empty()) return out;
  for (const Alike& alike : alike_) {
    v1::Goes goes = GoesOf(alike);
    if (goes.goes().empty()) continue;
    Addressed one;
    *one.message.mutable_goes() = std::move(goes);
    if (alike.all) {
      out.push_back(std::move(one));
      continue;
    }
    for (const int32_t node : alike.nodes) {
      one.node = node;
      out.push_back(one);
    }
  }
  sent_ = now;
  Forget();
  return out;
}

const RailTable& OutgoingGoes::TableOf(const Go& go) const {
  if (go.operation == RailOperation::kPublish) return tables_.weights;
  return go.kind == AttemptKind::kStep ? tables_.partials : tables_.adopts;
}

v1::Goes OutgoingGoes::GoesOf(const Alike& alike) const {
  const NodeRank any(alike.nodes.front());
  v1::Goes goes;
  std::vector<AbsentFragment> absent;
  for (const Go& held : held_) {
    Go go{
        .attempt = held.attempt, .rail = held.rail, .operation = held.operation, .kind = held.kind};
    const std::vector<NodeSet>& table = TableOf(held)[held.rail.value()];
    for (const BucketRun& run : held.buckets) {
      for (int32_t b = run.first.value(); b < run.end().value(); ++b) {
        if (table[b].contains(any)) Append(go.buckets, {BucketId(b), 1});
      }
    }
    if (go.buckets.empty()) continue;
    *goes.add_goes() = ToProto(go);
    absent.insert(absent.end(), held.absent.begin(), held.absent.end());
  }
  // A bucket goes on several rails.
  std::sort(absent.begin(), absent.end());
  absent.erase(std::unique(absent.begin(), absent.end()), absent.end());
  for (const AbsentFragment& fragment : absent) *goes.add_absent() = ToProto(fragment);
  return goes;
}

}  // namespace dmuond::scheduler
