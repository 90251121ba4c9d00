// RegisterLayout's request and reply travel in parts, because no message on the trainers' socket is
// larger than 4 MiB and a layout may be. What is no list stands in the first part; lists go on from
// part to part.
//
//   grpc::Status status = wire::RegisterLayout(*stub, context, request, reply);   // a caller
//   if (!wire::ReadParts(*stream, request)) …; wire::WriteParts(*stream, reply);  // a service
#ifndef DMUOND_WIRE_LAYOUT_PARTS_H_
#define DMUOND_WIRE_LAYOUT_PARTS_H_

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "dmuond/v1/trainer.pb.h"

namespace dmuond::wire {

// About: a part may be longer by one entry of a list.
inline constexpr size_t kPartBytes = size_t{1} << 20;

namespace internal {

inline size_t EntryBytes(int32_t /*entry*/) { return 10; }
template <typename Message>
size_t EntryBytes(const Message& message) {
  return message.ByteSizeLong() + 8;
}

template <typename Whole>
class Splitter {
 public:
  explicit Splitter(Whole first) : parts_(1) { parts_.back() = std::move(first); }
  // `list_of(part)` is the list that the entries of `list` go on in.
  template <typename List, typename ListOf>
  void Add(const List& list, const ListOf& list_of) {
    for (const auto& entry : list) {
      const size_t bytes = EntryBytes(entry);
      if (bytes_ > 0 && bytes_ + bytes > kPartBytes) {
        parts_.emplace_back();
        bytes_ = 0;
      }
      *list_of(parts_.back())->Add() = entry;
      bytes_ += bytes;
    }
  }
  [[nodiscard]] std::vector<Whole> Take() { return std::move(parts_); }

 private:
  std::vector<Whole> parts_;
  size_t bytes_ = 0;  // of the last part's lists
};

}  // namespace internal

[[nodiscard]] inline std::vector<v1::RegisterLayoutRequest> Split(
    const v1::RegisterLayoutRequest& whole) {
  v1::RegisterLayoutRequest first;
  if (whole.has_key()) *first.mutable_key() = whole.key();
  first.set_bucket_bytes(whole.bucket_bytes());
  if (whole.has_refusals()) first.set_refusals(whole.refusals());
  internal::Splitter<v1::RegisterLayoutRequest> parts(std::move(first));
  parts.Add(whole.parameters(), [](auto& part) { return part.mutable_parameters(); });
  parts.Add(whole.fragments(), [](auto& part) { return part.mutable_fragments(); });
  parts.Add(whole.groups(), [](auto& part) { return part.mutable_groups(); });
  return parts.Take();
}

[[nodiscard]] inline std::vector<v1::RegisterLayoutReply> Split(
    const v1::RegisterLayoutReply& whole) {
  v1::RegisterLayoutReply first;
  first.set_buckets(whole.buckets());
  first.set_plan_digest(whole.plan_digest());
  first.set_makespan_us(whole.makespan_us());
  first.set_lower_bound_us(whole.lower_bound_us());
  first.set_imbalance(whole.imbalance());
  internal::Splitter<v1::RegisterLayoutReply> parts(std::move(first));
  parts.Add(whole.routing(), [](auto& part) { return part.mutable_routing(); });
  parts.Add(whole.parameter_bucket(), [](auto& part) { return part.mutable_parameter_bucket(); });
  return parts.Take();
}

// A part after the first.
inline void Append(v1::RegisterLayoutRequest& whole, const v1::RegisterLayoutRequest& part) {
  whole.mutable_parameters()->MergeFrom(part.parameters());
  whole.mutable_fragments()->MergeFrom(part.fragments());
  whole.mutable_groups()->MergeFrom(part.groups());
}
inline void Append(v1::RegisterLayoutReply& whole, const v1::RegisterLayoutReply& part) {
  whole.mutable_routing()->MergeFrom(part.routing());
  whole.mutable_parameter_bucket()->MergeFrom(part.parameter_bucket());
}

// From a gRPC stream, to its end. False: nothing came.
template <typename Stream, typename Message>
bool ReadParts(Stream& stream, Message& whole) {
  whole.Clear();
  if (!stream.Read(&whole)) return false;
  Message part;
  while (stream.Read(&part)) Append(whole, part);
  return true;
}
// To a gRPC stream. False: it has broken, and says why when it is finished.
template <typename Stream, typename Message>
bool WriteParts(Stream& stream, const Message& whole) {
  for (const Message& part : Split(whole)) {
    if (!stream.Write(part)) return false;
  }
  return true;
}

// The whole call, as a unary one would be made.
template <typename Stub, typename Context>
auto RegisterLayout(Stub& stub, Context* context, const v1::RegisterLayoutRequest& request,
                    v1::RegisterLayoutReply* reply) {
  const auto stream = stub.RegisterLayout(context);
  WriteParts(*stream, request);
  stream->WritesDone();
  ReadParts(*stream, *reply);
  return stream->Finish();
}

}  // namespace dmuond::wire

#endif  // DMUOND_WIRE_LAYOUT_PARTS_H_
