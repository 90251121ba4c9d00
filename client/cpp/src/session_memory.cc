#include "client/cpp/src/session_memory.h"

#include <algorithm>
#include <optional>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"

namespace dmuond::client {
namespace {

// The elements of a box, from one arena to the same place of another one.
void CopyBox(std::byte* to, const std::byte* from, std::span<const int64_t> extents,
             std::span<const int64_t> strides, int64_t element_bytes) {
  if (extents.empty()) {
    std::copy_n(from, element_bytes, to);
    return;
  }
  if (extents.size() == 1 && strides[0] == 1) {
    std::copy_n(from, extents[0] * element_bytes, to);
    return;
  }
  for (int64_t i = 0; i < extents[0]; ++i) {
    const int64_t offset = i * strides[0] * element_bytes;
    CopyBox(to + offset, from + offset, extents.subspan(1), strides.subspan(1), element_bytes);
  }
}

}  // namespace

void SessionMemory::SetLayout(Layout layout, const Registered& registered) {
  layout_ = std::move(layout);
  bucket_of_ = registered.parameter_bucket;
  held_.assign(registered.buckets, 0);
  marked_.assign(registered.buckets, 0);
  fragments_of_.assign(layout_.parameters.size(), {});
  for (size_t i = 0; i < layout_.fragments.size(); ++i) {
    const Fragment& fragment = layout_.fragments[i];
    fragments_of_[fragment.parameter].push_back(static_cast<int32_t>(i));
    const int32_t bucket = bucket_of_[fragment.parameter];
    if (bucket >= 0 && client::Elements(fragment.box) > 0) held_[bucket] = 1;
  }
}

absl::Status SessionMemory::Map(const AttachSocket::Received& received) {
  if (received.frame.has_arena()) {
    const v1::AttachFrame::ArenaMemory& arena = received.frame.arena();
    absl::StatusOr<Mapping> mapping =
        Mapping::Of(received.fd.get(), static_cast<size_t>(arena.size_bytes()));
    if (!mapping.ok()) return mapping.status();
    arenas_.insert_or_assign(arena.arena(), *std::move(mapping));
    return absl::OkStatus();
  }
  if (!received.frame.has_timeline()) {
    return absl::InternalError("an attach frame that is neither arena nor timeline");
  }
  const v1::AttachFrame::TimelineMemory& timeline = received.frame.timeline();
  const size_t bytes = wire::TimelineBytes(timeline.buckets());
  if (timeline.buckets() != held_.size() || static_cast<size_t>(timeline.size_bytes()) < bytes) {
    return absl::InternalError(absl::StrCat("a timeline of ", timeline.buckets(), " buckets and ",
                                            timeline.size_bytes(), " bytes; ", held_.size(),
                                            " buckets are planned"));
  }
  absl::StatusOr<Mapping> mapping = Mapping::Of(received.fd.get(), bytes);
  if (!mapping.ok()) return mapping.status();
  const wire::PageHeader& header = wire::TimelinePage(mapping->data()).header();
  if (header.magic != wire::kTimelineMagic || header.version != wire::kTimelineVersion) {
    return absl::InternalError(absl::StrCat("the timeline page has magic ", header.magic,
                                            " and version ", header.version, ", not ",
                                            wire::kTimelineMagic, " and ", wire::kTimelineVersion));
  }
  timeline_ = *std::move(mapping);
  page_base_.store(timeline_.data());
  if (poisoned_.load()) Poison();
  return absl::OkStatus();
}

bool SessionMemory::complete() const {
  return timeline_.data() != nullptr && arenas_.size() == layout_.arenas.size();
}

const Fragment* SessionMemory::Find(int32_t parameter, int32_t fragment) const {
  if (parameter < 0 || static_cast<size_t>(parameter) >= fragments_of_.size()) return nullptr;
  const std::vector<int32_t>& fragments = fragments_of_[parameter];
  if (fragment < 0 || static_cast<size_t>(fragment) >= fragments.size()) return nullptr;
  return &layout_.fragments[fragments[fragment]];
}

std::byte* SessionMemory::At(const Fragment* fragment, const Slice& slice) const {
  const bool ours = layout_.parameters[fragment->parameter].route != Route::kTrainer;
  if (!ours || client::Elements(fragment->box) == 0) return nullptr;
  const auto arena = arenas_.find(slice.arena);
  return arena == arenas_.end() ? nullptr : arena->second.data() + slice.offset_bytes;
}

std::byte* SessionMemory::Weight(int32_t parameter, int32_t fragment) const {
  const Fragment* found = Find(parameter, fragment);
  return found == nullptr ? nullptr : At(found, found->weight);
}

std::byte* SessionMemory::Gradient(int32_t parameter, int32_t fragment) const {
  const Fragment* found = Find(parameter, fragment);
  return found == nullptr ? nullptr : At(found, found->gradient);
}

size_t SessionMemory::Elements(int32_t parameter, int32_t fragment) const {
  const Fragment* found = Find(parameter, fragment);
  if (found == nullptr || At(found, found->weight) == nullptr) return 0;
  return static_cast<size_t>(client::Elements(found->box));
}

void SessionMemory::MarkReady(int32_t bucket, uint64_t attempt) {
  if (bucket < 0 || static_cast<size_t>(bucket) >= held_.size()) return;
  if (held_[bucket] == 0 || marked_[bucket] == attempt) return;
  marked_[bucket] = attempt;
  wire::Advance(page().ready(bucket), attempt);
}

void SessionMemory::MarkAllReady(const std::vector<uint8_t>& held_back, uint64_t attempt) {
  for (size_t bucket = 0; bucket < held_.size(); ++bucket) {
    if (held_back[bucket] == 0) MarkReady(static_cast<int32_t>(bucket), attempt);
  }
}

void SessionMemory::MarkSubmitted(uint64_t attempt) { wire::Advance(page().submitted(), attempt); }

SessionMemory::Published SessionMemory::WaitPublished(
    uint64_t attempt, std::chrono::steady_clock::time_point deadline) const {
  const auto buckets = static_cast<uint32_t>(held_.size());
  for (uint32_t bucket = 0; bucket < buckets; ++bucket) {
    if (held_[bucket] == 0) continue;
    const uint64_t value = wire::WaitAtLeast(page().published(bucket, buckets), attempt, deadline);
    if (value >= wire::kPoison) return Published::kPoisoned;
    if (value < attempt) return Published::kTimeout;
  }
  return Published::kYes;
}

auto SessionMemory::ArrivedAttempts() const -> Arrived {
  const auto buckets = static_cast<uint32_t>(held_.size());
  std::optional<Arrived> arrived;
  for (uint32_t bucket = 0; bucket < buckets; ++bucket) {
    if (held_[bucket] == 0) continue;
    const uint64_t attempt = wire::Read(page().published(bucket, buckets));
    if (!arrived.has_value()) arrived = {attempt, attempt};
    arrived = {std::min(arrived->oldest, attempt), std::max(arrived->newest, attempt)};
  }
  return arrived.value_or(Arrived{});
}

SessionMemory::Copies SessionMemory::CopyArenas() const {
  Copies copies;
  for (const auto& [id, arena] : arenas_) {
    copies[id].assign(arena.data(), arena.data() + arena.bytes());
  }
  return copies;
}

void SessionMemory::Restore(const Copies& copies) {
  for (const auto& [id, bytes] : copies) std::ranges::copy(bytes, arenas_.at(id).data());
}

absl::Status SessionMemory::TakeOver(SessionMemory& kept) {
  for (auto& [id, arena] : arenas_) {
    const std::vector<std::byte> published(arena.data(), arena.data() + arena.bytes());
    std::copy_n(kept.arenas_.at(id).data(), arena.bytes(), arena.data());
    for (const Fragment& fragment : layout_.fragments) {
      const Parameter& parameter = layout_.parameters[fragment.parameter];
      const Slice& weight = fragment.weight;
      if (parameter.route == Route::kTrainer || weight.arena != id) continue;
      Extents extents = fragment.box.end;
      for (size_t i = 0; i < extents.size(); ++i) extents[i] -= fragment.box.begin[i];
      if (std::ranges::any_of(extents, [](int64_t extent) { return extent <= 0; })) continue;
      CopyBox(arena.data() + weight.offset_bytes, published.data() + weight.offset_bytes, extents,
              weight.strides, SizeOf(parameter.weight_type));
    }
  }
  for (auto& [id, arena] : arenas_) {
    absl::Status moved = arena.MoveTo(kept.arenas_.at(id));
    if (!moved.ok()) return moved;
  }
  kept.arenas_.clear();
  return absl::OkStatus();
}

void SessionMemory::Poison() {
  // Map() stores the page and then looks here; one of the two sees the other.
  poisoned_.store(true);
  std::byte* base = page_base_.load();
  if (base == nullptr) return;
  const wire::TimelinePage page(base);
  const auto buckets = static_cast<uint32_t>(held_.size());
  for (uint32_t bucket = 0; bucket < buckets; ++bucket) {
    wire::Advance(page.published(bucket, buckets), wire::kPoison);
  }
}

}  // namespace dmuond::client
