#include "server/lane/extract_check.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
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
  extract_.reset();
}

v1::ExtractsChecked ExtractCheck::Spoil() {
  answer_.clear_digests();
  answer_.set_again(true);
  order_.reset();
  return std::move(answer_);
}

std::optional<v1::ExtractsChecked> ExtractCheck::Progress(
    absl::FunctionRef<bool(int32_t)> has_weights) {
  const absl::StatusOr<bool> digested = DigestNext(has_weights);
  if (digested.ok() && *digested) return std::nullopt;
  if (!digested.ok()) {
    answer_.clear_digests();
    answer_.set_error(std::string(digested.status().message()));
  }
  order_.reset();
  return std::move(answer_);
}

absl::StatusOr<bool> ExtractCheck::DigestNext(absl::FunctionRef<bool(int32_t)> has_weights) {
  if (scratch_ == nullptr) {
    ASSIGN_OR_RETURN(scratch_,
                     device_.AllocateHost(scheduler::kExtractElementsMax * sizeof(float)));
  }
  for (; next_ < order_->extracts_size(); ++next_) {
    if (!extract_.has_value()) {
      ASSIGN_OR_RETURN(const bool has_parts, Begin(order_->extracts(next_)));
      if (!has_parts) continue;
    }
    ASSIGN_OR_RETURN(bool digested, DigestState());
    if (!digested) {
      ASSIGN_OR_RETURN(digested, DigestCopy(has_weights));
    }
    if (digested) return true;
    *answer_.add_digests() = std::move(extract_->digests);
    extract_.reset();
  }
  return false;
}

absl::StatusOr<bool> ExtractCheck::Begin(const v1::Extract& wire) {
  if (wire.rail() != job_.program.rail.value()) return false;
  const scheduler::LaneUnit* const of = job_.program.Find(scheduler::UnitId(wire.unit()));
  if (of == nullptr) return false;  // none of the node's trainers holds it
  Extract extract;
  extract.of = of;
  extract.digests.set_extract(next_);
  ASSIGN_OR_RETURN(extract.box, FromProto(wire.box()));
  bool inside = Contains(of->unit.box, extract.box) &&
                scheduler::Elements(extract.box) <= scheduler::kExtractElementsMax;
  for (const v1::Box& part : wire.held()) {
    ASSIGN_OR_RETURN(Box box, FromProto(part));
    inside = inside && Contains(extract.box, box);
    extract.held.push_back(std::move(box));
  }
  if (!inside) {
    return absl::InvalidArgumentError(
        absl::StrCat("an extract ", ToString(extract.box), " of unit ", wire.unit()));
  }
  extract_ = std::move(extract);
  return true;
}

absl::StatusOr<bool> ExtractCheck::DigestState() {
  const scheduler::Unit& unit = extract_->of->unit;
  v1::ExtractDigests& digests = extract_->digests;
  const auto held = static_cast<int>(extract_->held.size());
  if (!job_.program.Owns(*extract_->of)) return false;
  const int32_t tensors = slots_.tensors(unit.id);
  if (digests.state_size() == tensors && digests.rounded_size() == held) return false;
  const StateView state = slots_.Current(unit.id);
  if (!state.exists()) {
    return absl::FailedPreconditionError(absl::StrCat("unit ", unit.id.value(), " has no state"));
  }
  const auto digest = [&](int32_t tensor, const Box& part, DType as) {
    auto* const data = reinterpret_cast<std::byte*>(slots_.Tensor(unit.id, state.slot, tensor));
    return DigestOf(At(data, DType::kF32, ViewInUnit(unit, part)), part, as);
  };
  if (digests.state_size() < tensors) {
    digests.set_written((static_cast<uint64_t>(state.step.value()) << 28) |
                        (uint64_t{state.flips} << 20) | static_cast<uint64_t>(state.slot + 1));
    ASSIGN_OR_RETURN(const uint64_t of_tensor,
                     digest(digests.state_size(), extract_->box, DType::kF32));
    digests.add_state(of_tensor);
    return true;
  }
  ASSIGN_OR_RETURN(const uint64_t of_weights,
                   digest(tensors - 1, extract_->held[digests.rounded_size()],
                          ToDType(job_.parameter(unit.id).weight_type)));
  digests.add_rounded(of_weights);
  return true;
}

absl::StatusOr<bool> ExtractCheck::DigestCopy(absl::FunctionRef<bool(int32_t)> has_weights) {
  const scheduler::LaneUnit& of = *extract_->of;
  const std::vector<Box>& held = extract_->held;
  v1::ExtractDigests& digests = extract_->digests;
  const DType dtype = ToDType(job_.program.FindParameter(of.unit.parameter)->weight_type);
  while (extract_->next_holder < of.holders.size()) {
    const scheduler::Fragment& fragment =
        job_.program.fragments[of.holders[extract_->next_holder++]];
    const Box part = Intersect(fragment.box, extract_->box);
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
    ASSIGN_OR_RETURN(const uint64_t digest, DigestOf(from, part, dtype));
    const auto index = static_cast<int32_t>(place - held.begin());
    auto same = std::find_if(digests.mutable_copies()->begin(), digests.mutable_copies()->end(),
                             [&](const v1::ExtractDigests::Copies& copies) {
                               return copies.held() == index && copies.digest() == digest;
                             });
    v1::ExtractDigests::Copies& copies =
        same == digests.mutable_copies()->end() ? *digests.add_copies() : *same;
    copies.set_held(index);
    copies.set_digest(digest);
    copies.add_ranks(fragment.rank.value());
    return true;
  }
  return false;
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
