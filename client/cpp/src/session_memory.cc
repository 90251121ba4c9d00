#include "client/cpp/src/session_memory.h"

#include <algorithm>
#include <optional>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "client/cpp/src/status.h"
#include "dmuond/client/errors.h"

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

absl::StatusOr<std::vector<std::byte>> BytesOf(const Arenas::Memory& arena) {
  std::vector<std::byte> bytes(arena.bytes());
  RETURN_IF_ERROR(arena.Read(bytes.data()));
  return bytes;
}

uint64_t* ValueOf(wire::TimelineWord& word) { return reinterpret_cast<uint64_t*>(&word.value); }

}  // namespace

SessionMemory::~SessionMemory() {
  // Streams that wait for words go on.
  Poison();
}

void SessionMemory::SetArenas(std::shared_ptr<Arenas> arenas) {
  if (arenas != nullptr) source_ = std::move(arenas);
}

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

absl::Status SessionMemory::FillArenas(v1::AttachBuffersRequest& request) {
  for (const ArenaSpec& spec : layout_.arenas) {
    v1::Arena& arena = *request.add_arenas();
    arena.set_id(spec.id);
    arena.set_size_bytes(spec.size_bytes);
    if (spec.memory == nullptr) {
      arena.mutable_daemon();
      continue;
    }
    absl::StatusOr<Arenas::Own> own =
        source_->Export(spec.memory, static_cast<size_t>(spec.size_bytes));
    if (!own.ok()) {
      return MakeError(own.status().code(), "ARENA_INVALID",
                       absl::StrCat("arena ", spec.id, ": ", own.status().message()));
    }
    v1::Arena::CudaIpc& ipc = *arena.mutable_cuda_ipc();
    ipc.set_handle(own->handle);
    ipc.set_base_offset(own->base_offset);
    ipc.set_allocation_bytes(own->allocation_bytes);
    ipc.set_device_uuid(source_->device_uuid());
    ipc.set_buffer_id(own->buffer_id);
    arenas_.insert_or_assign(spec.id, std::move(own->memory));
  }
  return absl::OkStatus();
}

absl::Status SessionMemory::Map(const AttachSocket::Received& received) {
  if (received.frame.has_arena()) {
    const v1::AttachFrame::ArenaMemory& arena = received.frame.arena();
    ASSIGN_OR_RETURN(std::unique_ptr<Arenas::Memory> memory,
                     source_->Map(received.fd.get(), static_cast<size_t>(arena.size_bytes())));
    arenas_.insert_or_assign(arena.arena(), std::move(memory));
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
  ASSIGN_OR_RETURN(Mapping mapping, Mapping::Of(received.fd.get(), bytes));
  const wire::PageHeader& header = wire::TimelinePage(mapping.data()).header();
  if (header.magic != wire::kTimelineMagic || header.version != wire::kTimelineVersion) {
    return absl::InternalError(absl::StrCat("the timeline page has magic ", header.magic,
                                            " and version ", header.version, ", not ",
                                            wire::kTimelineMagic, " and ", wire::kTimelineVersion));
  }
  ASSIGN_OR_RETURN(std::unique_ptr<Arenas::Words> words,
                   source_->MakeWords(mapping.data(), mapping.bytes()));
  timeline_ = std::move(mapping);
  words_ = std::move(words);
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
  return arena == arenas_.end() ? nullptr : arena->second->data() + slice.offset_bytes;
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

absl::Status SessionMemory::Store(std::span<wire::TimelineWord* const> words, uint64_t attempt,
                                  Stream stream) {
  if (words_ != nullptr) {
    std::vector<uint64_t*> values;
    for (wire::TimelineWord* word : words) values.push_back(ValueOf(*word));
    return words_->StoreAfter(stream, values, attempt);
  }
  if (stream.has_value()) {
    return WrongState("a stream was given, but the session has no DeviceArenas (Options::arenas)");
  }
  for (wire::TimelineWord* word : words) wire::Advance(*word, attempt);
  return absl::OkStatus();
}

absl::Status SessionMemory::MarkReady(int32_t bucket, uint64_t attempt, Stream stream) {
  if (bucket < 0 || static_cast<size_t>(bucket) >= held_.size()) return absl::OkStatus();
  if (held_[bucket] == 0 || marked_[bucket] == attempt) return absl::OkStatus();
  wire::TimelineWord* const word = &page().ready(bucket);
  absl::Status stored = Store({&word, 1}, attempt, stream);
  if (stored.ok()) marked_[bucket] = attempt;
  return stored;
}

absl::Status SessionMemory::MarkAllReady(const std::vector<uint8_t>& held_back, uint64_t attempt,
                                         Stream stream) {
  std::vector<wire::TimelineWord*> words;
  for (size_t bucket = 0; bucket < held_.size(); ++bucket) {
    if (held_back[bucket] != 0 || held_[bucket] == 0 || marked_[bucket] == attempt) continue;
    marked_[bucket] = attempt;
    words.push_back(&page().ready(bucket));
  }
  return words.empty() ? absl::OkStatus() : Store(words, attempt, stream);
}

absl::Status SessionMemory::MarkSubmitted(uint64_t attempt, Stream stream) {
  wire::TimelineWord* const word = &page().submitted();
  return Store({&word, 1}, attempt, stream);
}

absl::Status SessionMemory::EnqueueWait(uint64_t attempt, CUstream_st* stream) {
  if (words_ == nullptr) {
    return WrongState("a stream was given, but the session has no DeviceArenas (Options::arenas)");
  }
  std::vector<uint64_t*> words;
  const auto buckets = static_cast<uint32_t>(held_.size());
  for (uint32_t bucket = 0; bucket < buckets; ++bucket) {
    wire::TimelineWord& word = page().published(bucket, buckets);
    if (held_[bucket] != 0 && wire::Read(word) < attempt) words.push_back(ValueOf(word));
  }
  return words_->WaitFor(stream, words, attempt);
}

absl::Status SessionMemory::CheckDevice() {
  absl::Status status = words_ == nullptr ? absl::OkStatus() : words_->Check();
  if (status.ok()) return status;
  return MakeError(
      absl::StatusCode::kInternal, kCudaFailed,
      absl::StrCat("this process's work on its GPU has failed, so that its signals never come: ",
                   status.message(), ". End the process: its replacement goes on from this step"),
      MetadataOf(status));
}

absl::Status SessionMemory::FinishStreams() {
  return words_ == nullptr ? absl::OkStatus() : words_->Finish();
}

SessionMemory::Published SessionMemory::WaitPublished(
    uint64_t attempt, std::chrono::steady_clock::time_point deadline) const {
  const auto buckets = static_cast<uint32_t>(held_.size());
  for (uint32_t bucket = 0; bucket < buckets; ++bucket) {
    if (held_[bucket] == 0) continue;
    const uint64_t value = wire::WaitAtLeast(page().published(bucket, buckets), attempt, deadline);
    if (value >= wire::kPoison) return Published::kPoisoned;
    if (value < attempt || wire::IsRollbackMark(value)) return Published::kNo;
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

absl::StatusOr<SessionMemory::Copies> SessionMemory::CopyArenas() const {
  Copies copies;
  for (const auto& [id, arena] : arenas_) {
    ASSIGN_OR_RETURN(copies[id], BytesOf(*arena));
  }
  return copies;
}

absl::Status SessionMemory::Restore(const Copies& copies) {
  for (const auto& [id, bytes] : copies) {
    RETURN_IF_ERROR(arenas_.at(id)->Write(bytes.data()));
  }
  return absl::OkStatus();
}

absl::Status SessionMemory::TakeOver(SessionMemory& kept) {
  for (auto& [id, arena] : arenas_) {
    if (arena->data() == kept.arenas_.at(id)->data()) continue;  // the trainer's own
    ASSIGN_OR_RETURN(const std::vector<std::byte> published, BytesOf(*arena));
    ASSIGN_OR_RETURN(std::vector<std::byte> bytes, BytesOf(*kept.arenas_.at(id)));
    for (const Fragment& fragment : layout_.fragments) {
      const Parameter& parameter = layout_.parameters[fragment.parameter];
      const Slice& weight = fragment.weight;
      if (parameter.route == Route::kTrainer || weight.arena != id) continue;
      Extents extents = fragment.box.end;
      for (size_t i = 0; i < extents.size(); ++i) extents[i] -= fragment.box.begin[i];
      if (std::ranges::any_of(extents, [](int64_t extent) { return extent <= 0; })) continue;
      CopyBox(bytes.data() + weight.offset_bytes, published.data() + weight.offset_bytes, extents,
              weight.strides, SizeOf(parameter.weight_type));
    }
    RETURN_IF_ERROR(arena->Write(bytes.data()));
  }
  for (auto& [id, arena] : arenas_) {
    RETURN_IF_ERROR(arena->MoveTo(*kept.arenas_.at(id)));
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
