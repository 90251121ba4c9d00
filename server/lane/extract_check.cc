#include "server/lane/extract_check.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/cpu/cast.h"
#include "scheduler/convert/convert.h"
#include "scheduler/extract.h"
#include "server/lane/strided.h"
#include "server/storage/checksum.h"

namespace dmuond::server::lane {
namespace {

using kernels::DType;
using scheduler::Box;

// In place: an element of the result lies no further than the one that it is made of.
template <typename Type>
void Round(std::byte* data, int64_t elements) {
  for (int64_t i = 0; i < elements; ++i) {
    float value = 0;
    std::memcpy(&value, data + (i * static_cast<int64_t>(sizeof(float))), sizeof(value));
    const typename Type::Storage rounded = Type::Store(value);
    std::memcpy(data + (i * static_cast<int64_t>(sizeof(rounded))), &rounded, sizeof(rounded));
  }
}

}  // namespace

void ExtractCheck::Start(v1::CheckExtracts order) {
  answer_.Clear();
  answer_.set_number(order.number());
  order_ = std::move(order);
  next_ = 0;
}

v1::ExtractsChecked ExtractCheck::Spoil() {
  answer_.clear_digests();
  answer_.set_again(true);
  order_.reset();
  return std::move(answer_);
}

std::optional<v1::ExtractsChecked> ExtractCheck::Progress(
    absl::FunctionRef<bool(int32_t)> has_weights) {
  while (next_ < order_->extracts_size() &&
         order_->extracts(next_).rail() != job_.program.rail.value()) {
    ++next_;
  }
  if (next_ < order_->extracts_size()) {
    const absl::Status digested = DigestNext(has_weights);
    ++next_;
    if (digested.ok()) return std::nullopt;
    answer_.clear_digests();
    answer_.set_error(std::string(digested.message()));
  }
  order_.reset();
  return std::move(answer_);
}

absl::Status ExtractCheck::DigestNext(absl::FunctionRef<bool(int32_t)> has_weights) {
  if (scratch_ == nullptr) {
    auto scratch = device_.AllocateHost(scheduler::kExtractElementsMax * sizeof(float));
    if (!scratch.ok()) return scratch.status();
    scratch_ = *std::move(scratch);
  }
  const v1::Extract& extract = order_->extracts(next_);
  const scheduler::LaneUnit* const of = job_.program.Find(scheduler::UnitId(extract.unit()));
  if (of == nullptr) return absl::OkStatus();  // none of the node's trainers holds it
  const absl::StatusOr<Box> box = FromProto(extract.box());
  if (!box.ok()) return box.status();
  std::vector<Box> held;
  for (const v1::Box& wire : extract.held()) {
    absl::StatusOr<Box> part = FromProto(wire);
    if (!part.ok()) return part.status();
    held.push_back(*std::move(part));
  }
  const auto inside = [&](const Box& part) { return Contains(*box, part); };
  if (!Contains(of->unit.box, *box) || scheduler::Elements(*box) > scheduler::kExtractElementsMax ||
      !std::all_of(held.begin(), held.end(), inside)) {
    return absl::InvalidArgumentError(
        absl::StrCat("an extract ", ToString(*box), " of unit ", extract.unit()));
  }
  v1::ExtractDigests digests;
  digests.set_extract(next_);
  absl::Status status;
  if (job_.program.Owns(*of)) status = DigestState(of->unit, *box, held, digests);
  if (status.ok()) status = DigestCopies(*of, *box, held, has_weights, digests);
  *answer_.add_digests() = std::move(digests);
  return status;
}

absl::Status ExtractCheck::DigestState(const scheduler::Unit& unit, const Box& box,
                                       const std::vector<Box>& held, v1::ExtractDigests& digests) {
  const StateView state = slots_.Current(unit.id);
  if (!state.exists()) {
    return absl::FailedPreconditionError(absl::StrCat("unit ", unit.id.value(), " has no state"));
  }
  digests.set_written((static_cast<uint64_t>(state.step.value()) << 28) |
                      (uint64_t{state.flips} << 20) | static_cast<uint64_t>(state.slot + 1));
  const auto part_of = [&](int32_t tensor, const Box& part) {
    auto* const data = reinterpret_cast<std::byte*>(slots_.Tensor(unit.id, state.slot, tensor));
    return At(data, DType::kF32, ViewInUnit(unit, part));
  };
  const int32_t master = slots_.tensors(unit.id) - 1;
  for (int32_t tensor = 0; tensor <= master; ++tensor) {
    const absl::StatusOr<uint64_t> digest = DigestOf(part_of(tensor, box), box, DType::kF32);
    if (!digest.ok()) return digest.status();
    digests.add_state(*digest);
  }
  const DType weights = ToDType(job_.parameter(unit.id).weight_type);
  for (const Box& part : held) {
    const absl::StatusOr<uint64_t> digest = DigestOf(part_of(master, part), part, weights);
    if (!digest.ok()) return digest.status();
    digests.add_rounded(*digest);
  }
  return absl::OkStatus();
}

absl::Status ExtractCheck::DigestCopies(const scheduler::LaneUnit& of, const Box& box,
                                        const std::vector<Box>& held,
                                        absl::FunctionRef<bool(int32_t)> has_weights,
                                        v1::ExtractDigests& digests) {
  const DType dtype = ToDType(job_.program.FindParameter(of.unit.parameter)->weight_type);
  for (const int32_t f : of.holders) {
    const scheduler::Fragment& fragment = job_.program.fragments[f];
    const Box part = Intersect(fragment.box, box);
    if (Empty(part) || !has_weights(fragment.rank.value())) continue;
    const scheduler::StridedView view = ViewInSlice(fragment.box, fragment.weight.strides, part);
    std::byte* const data = trainers_.Address(fragment.rank.value(), fragment.weight.arena,
                                              OffsetBytes(fragment.weight, view, dtype));
    if (data == nullptr) continue;
    const auto place = std::find(held.begin(), held.end(), part);
    if (place == held.end()) {
      return absl::InvalidArgumentError(absl::StrCat("trainer ", fragment.rank.value(), " holds ",
                                                     ToString(part), ", which the order lacks"));
    }
    kernels::StridedBox from = At(nullptr, dtype, view);
    from.data = data;
    const absl::StatusOr<uint64_t> digest = DigestOf(from, part, dtype);
    if (!digest.ok()) return digest.status();
    const auto index = static_cast<int32_t>(place - held.begin());
    auto same = std::find_if(digests.mutable_copies()->begin(), digests.mutable_copies()->end(),
                             [&](const v1::ExtractDigests::Copies& copies) {
                               return copies.held() == index && copies.digest() == *digest;
                             });
    v1::ExtractDigests::Copies& copies =
        same == digests.mutable_copies()->end() ? *digests.add_copies() : *same;
    copies.set_held(index);
    copies.set_digest(*digest);
    copies.add_ranks(fragment.rank.value());
  }
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> ExtractCheck::DigestOf(const kernels::StridedBox& from, const Box& box,
                                                DType as) {
  std::byte* const data = scratch_->data();
  absl::Status status =
      device_.ops().Copy(stream_, At(data, from.dtype, ViewInBox(box, box)), from);
  if (status.ok()) status = stream_.Synchronize();
  if (!status.ok()) return status;
  const int64_t elements = scheduler::Elements(box);
  if (from.dtype != as) {
    if (as == DType::kBF16) {
      Round<kernels::cpu::BF16>(data, elements);
    } else {
      Round<kernels::cpu::F16>(data, elements);
    }
  }
  return storage::Checksum64Of({data, static_cast<size_t>(elements) * kernels::SizeOf(as)});
}

}  // namespace dmuond::server::lane
