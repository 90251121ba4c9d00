#include "scheduler/convert/registrations.h"

#include <algorithm>
#include <limits>
#include <string>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "scheduler/limits.h"

namespace dmuond {
namespace {

constexpr int kOwn = 3;  // rank, node and home lane come before the numbers of the fragments

// Room that the columns of one class may take when they are read.
constexpr int64_t kColumnNumbersMax = int64_t{1} << 27;

// Sums and differences of numbers of which nobody has checked how large they are: modulo 2^64.
int64_t Plus(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
}
int64_t Minus(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<uint64_t>(a) - static_cast<uint64_t>(b));
}

template <typename Visit>
void VisitAll(google::protobuf::RepeatedField<int64_t>& numbers, const Visit& visit) {
  for (int64_t& number : numbers) visit(number);
}

template <typename Visit>
void VisitSlice(v1::Slice& slice, const Visit& visit) {
  int64_t offset_bytes = slice.offset_bytes();
  visit(offset_bytes);
  slice.set_offset_bytes(offset_bytes);
  VisitAll(*slice.mutable_strides(), visit);
}

// Calls visit(int64_t&) with every number of the fragments.
template <typename Visit>
void VisitNumbers(v1::Registration& registration, const Visit& visit) {
  for (v1::Fragment& fragment : *registration.mutable_fragments()) {
    if (fragment.has_box()) {
      VisitAll(*fragment.mutable_box()->mutable_begin(), visit);
      VisitAll(*fragment.mutable_box()->mutable_end(), visit);
    }
    if (fragment.has_gradient()) VisitSlice(*fragment.mutable_gradient(), visit);
    if (fragment.has_weight()) VisitSlice(*fragment.mutable_weight(), visit);
  }
}

int64_t CountNumbers(const v1::Registration& registration) {
  int64_t count = 0;
  for (const v1::Fragment& fragment : registration.fragments()) {
    count += fragment.box().begin_size() + fragment.box().end_size();
    if (fragment.has_gradient()) count += 1 + fragment.gradient().strides_size();
    if (fragment.has_weight()) count += 1 + fragment.weight().strides_size();
  }
  return count;
}

absl::Status WrongNumbers(const char* what, int64_t given, int64_t wanted) {
  return absl::InvalidArgumentError(
      absl::StrCat(what, " has ", given, " numbers instead of ", wanted));
}

// `number(i)` is the i-th.
template <typename Number>
void FillIn(v1::Registration& registration, const Number& number) {
  size_t i = 0;
  VisitNumbers(registration, [&](int64_t& place) { place = number(i++); });
}

// (ranks, step) pairs of how far each member is beyond the one before it.
void SetRuns(const std::vector<int64_t>& beyond, v1::RegistrationClass::Column& column) {
  int64_t before = 0;
  for (size_t i = 0; i < beyond.size();) {
    const int64_t step = Minus(beyond[i], before);
    int64_t ranks = 0;
    for (; i < beyond.size() && Minus(beyond[i], before) == step; ++i, ++ranks) before = beyond[i];
    column.add_runs(ranks);
    column.add_runs(step);
  }
}

// Numbers as bytes, of which small ones take one.
void AppendNumber(int64_t number, std::string& out) {
  auto zigzag = (static_cast<uint64_t>(number) << 1) ^ static_cast<uint64_t>(number >> 63);
  for (; zigzag >= 0x80; zigzag >>= 7) out.push_back(static_cast<char>(zigzag | 0x80));
  out.push_back(static_cast<char>(zigzag));
}

// REQUIRES: the bytes are AppendNumber()'s.
int64_t TakeNumber(absl::string_view& in) {
  uint64_t zigzag = 0;
  for (int shift = 0;; shift += 7) {
    const auto byte = static_cast<uint8_t>(in.front());
    in.remove_prefix(1);
    zigzag |= uint64_t{byte & 0x7fU} << shift;
    if (byte < 0x80) break;
  }
  return static_cast<int64_t>(zigzag >> 1) ^ -static_cast<int64_t>(zigzag & 1);
}

v1::Registration MemberOf(const ClassReader& reader, int32_t member) {
  v1::Registration registration = reader.common();
  registration.set_rank(reader.rank(member));
  registration.set_node(reader.node(member));
  registration.set_home_lane(reader.home_lane(member));
  FillIn(registration, [&](size_t i) { return reader.number(member, i); });
  return registration;
}

}  // namespace

v1::Registration Pack(v1::Registration registration) {
  if (!registration.common().empty()) return registration;
  v1::Registration packed;
  packed.set_rank(registration.rank());
  packed.set_node(registration.node());
  packed.set_home_lane(registration.home_lane());
  packed.set_job(registration.job());
  packed.set_world_size(registration.world_size());
  packed.mutable_numbers()->Reserve(static_cast<int>(CountNumbers(registration)));
  VisitNumbers(registration,
               [&](int64_t& number) { packed.add_numbers(std::exchange(number, 0)); });
  registration.clear_rank();
  registration.clear_node();
  registration.clear_home_lane();
  packed.set_common(registration.SerializeAsString());
  return packed;
}

absl::StatusOr<v1::Registration> Unpack(const v1::Registration& packed) {
  if (packed.common().empty()) return packed;
  v1::Registration registration;
  if (!registration.ParseFromString(packed.common())) {
    return absl::InvalidArgumentError(
        absl::StrCat("trainer ", packed.rank(), ": a registration that cannot be read"));
  }
  if (const int64_t count = CountNumbers(registration); packed.numbers_size() != count) {
    return WrongNumbers(absl::StrCat("the registration of trainer ", packed.rank()).c_str(),
                        packed.numbers_size(), count);
  }
  registration.set_rank(packed.rank());
  registration.set_node(packed.node());
  registration.set_home_lane(packed.home_lane());
  FillIn(registration, [&](size_t i) { return packed.numbers(static_cast<int>(i)); });
  return registration;
}

bool GatheredRegistrations::Set(const v1::Registration& registration) {
  const bool is_packed = !registration.common().empty();
  const v1::Registration packed = is_packed ? registration : Pack(registration);
  const auto [known, is_new] =
      class_of_.try_emplace(packed.common(), static_cast<int32_t>(classes_.size()));
  if (is_new) {
    classes_.push_back({{packed.numbers().begin(), packed.numbers().end()}});
  }
  const std::vector<int64_t>& first = classes_[known->second].numbers;
  Member member{.of_class = known->second};
  member.rest.set_rank(packed.rank());
  member.rest.set_node(packed.node());
  member.rest.set_home_lane(packed.home_lane());
  member.rest.set_job(packed.job());
  member.rest.set_world_size(packed.world_size());
  for (int i = 0; i < packed.numbers_size(); ++i) {
    const int64_t of_first = static_cast<size_t>(i) < first.size() ? first[i] : 0;
    AppendNumber(Minus(packed.numbers(i), of_first), member.differences);
  }
  member.differences.shrink_to_fit();
  Member& place = by_rank_[packed.rank()];
  const bool same = place.of_class == member.of_class && place.differences == member.differences &&
                    place.rest.SerializeAsString() == member.rest.SerializeAsString();
  place = std::move(member);
  return !same;
}

std::vector<int64_t> GatheredRegistrations::NumbersOf(const Member& member) const {
  const std::vector<int64_t>& first = classes_[member.of_class].numbers;
  std::vector<int64_t> numbers;
  numbers.reserve(first.size());
  for (absl::string_view left = member.differences; !left.empty();) {
    const int64_t of_first = numbers.size() < first.size() ? first[numbers.size()] : 0;
    numbers.push_back(Plus(TakeNumber(left), of_first));
  }
  return numbers;
}

// `members` of one class, by rank; at least one.
absl::Status GatheredRegistrations::AddClass(const std::string& common,
                                             const std::vector<const Member*>& members,
                                             v1::PlanInputs& inputs) const {
  v1::RegistrationClass& out = *inputs.add_classes();
  const v1::Registration& lowest = members.front()->rest;
  if (!out.mutable_common()->ParseFromString(common)) {
    return absl::InvalidArgumentError(
        absl::StrCat("trainer ", lowest.rank(), ": a registration that cannot be read"));
  }
  const int64_t count = CountNumbers(out.common());
  out.set_ranks(static_cast<int32_t>(members.size()));
  // beyond[i] holds how much the later members' i-th numbers are above the first's, where any is.
  std::vector<std::vector<int64_t>> beyond(count + kOwn);
  for (size_t m = 0; m < members.size(); ++m) {
    const v1::Registration& rest = members[m]->rest;
    const std::vector<int64_t> numbers = NumbersOf(*members[m]);
    if (static_cast<int64_t>(numbers.size()) != count) {
      return WrongNumbers(absl::StrCat("the registration of trainer ", rest.rank()).c_str(),
                          static_cast<int64_t>(numbers.size()), count);
    }
    const auto number = [&](int64_t i) -> int64_t {
      if (i == 0) return rest.rank();
      if (i == 1) return rest.node();
      return i == 2 ? rest.home_lane() : numbers[i - kOwn];
    };
    if (m == 0) {
      for (int64_t i = 0; i < count + kOwn; ++i) out.add_numbers(number(i));
      continue;
    }
    for (int64_t i = 0; i < count + kOwn; ++i) {
      const int64_t difference = Minus(number(i), out.numbers(static_cast<int>(i)));
      if (difference == 0 && beyond[i].empty()) continue;
      if (beyond[i].empty()) {
        beyond[i].reserve(members.size() - 1);
        beyond[i].assign(m - 1, 0);
      }
      beyond[i].push_back(difference);
    }
  }
  absl::flat_hash_map<std::vector<int64_t>, uint32_t> known;  // column -> its number, from 1
  for (std::vector<int64_t>& one : beyond) {
    if (one.empty()) {
      out.add_column_of(0);
      continue;
    }
    const auto [found, added] =
        known.try_emplace(std::move(one), static_cast<uint32_t>(out.columns_size() + 1));
    if (added) SetRuns(found->first, *out.add_columns());
    out.add_column_of(found->second);
  }
  return absl::OkStatus();
}

absl::Status GatheredRegistrations::AddTo(v1::PlanInputs& inputs) const {
  std::vector<std::vector<const Member*>> members(classes_.size());
  std::vector<int32_t> order;  // classes, by their lowest rank
  for (const auto& [rank, member] : by_rank_) {
    if (members[member.of_class].empty()) order.push_back(member.of_class);
    members[member.of_class].push_back(&member);
  }
  std::vector<const std::string*> commons(classes_.size());
  for (const auto& [common, index] : class_of_) commons[index] = &common;
  for (const int32_t c : order) {
    if (members[c].size() > 1) {
      if (absl::Status added = AddClass(*commons[c], members[c], inputs); !added.ok()) return added;
      continue;
    }
    v1::Registration packed = members[c].front()->rest;
    packed.set_common(*commons[c]);
    const std::vector<int64_t> numbers = NumbersOf(*members[c].front());
    packed.mutable_numbers()->Add(numbers.begin(), numbers.end());
    absl::StatusOr<v1::Registration> one = Unpack(packed);
    if (!one.ok()) return one.status();
    *inputs.add_registrations() = *std::move(one);
  }
  return absl::OkStatus();
}

int32_t WorldSizeOf(const v1::PlanInputs& inputs) {
  int64_t ranks = inputs.registrations_size();
  for (const v1::RegistrationClass& one : inputs.classes()) ranks += std::max(0, one.ranks());
  return static_cast<int32_t>(std::min<int64_t>(ranks, std::numeric_limits<int32_t>::max()));
}

const v1::Registration& AnyOf(const v1::PlanInputs& inputs) {
  if (!inputs.registrations().empty()) return inputs.registrations(0);
  if (!inputs.classes().empty()) return inputs.classes(0).common();
  return v1::Registration::default_instance();
}

absl::StatusOr<v1::Registration> RegistrationOf(const v1::PlanInputs& inputs, int32_t rank) {
  for (const v1::Registration& registration : inputs.registrations()) {
    if (registration.rank() == rank) return registration;
  }
  for (const v1::RegistrationClass& one : inputs.classes()) {
    absl::StatusOr<ClassReader> reader = ClassReader::Make(one);
    if (!reader.ok()) return reader.status();
    for (int32_t member = 0; member < reader->size(); ++member) {
      if (reader->rank(member) == rank) return MemberOf(*reader, member);
    }
  }
  return absl::NotFoundError(absl::StrCat("rank ", rank, " has not registered"));
}

absl::StatusOr<ClassReader> ClassReader::Make(const v1::RegistrationClass& wire) {
  ClassReader reader;
  reader.wire_ = &wire;
  reader.size_ = wire.ranks();
  const int64_t count = CountNumbers(wire.common()) + kOwn;
  if (wire.ranks() < 1 || wire.ranks() > scheduler::kWorldMax) {
    return absl::InvalidArgumentError(absl::StrCat("a class of ", wire.ranks(),
                                                   " registrations; 1 to ", scheduler::kWorldMax,
                                                   " are possible"));
  }
  if (wire.numbers_size() != count) {
    return WrongNumbers("a class of registrations", wire.numbers_size(), count);
  }
  if (wire.column_of_size() != count) {
    return WrongNumbers("column_of of a class of registrations", wire.column_of_size(), count);
  }
  if (int64_t{wire.columns_size()} * wire.ranks() > kColumnNumbersMax) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a class of ", wire.ranks(), " registrations has ", wire.columns_size(), " columns"));
  }
  for (const uint32_t column : wire.column_of()) {
    if (column > static_cast<uint32_t>(wire.columns_size())) {
      return absl::InvalidArgumentError(absl::StrCat("column ", column, " of ", wire.columns_size(),
                                                     " of a class of registrations"));
    }
  }
  for (const v1::RegistrationClass::Column& column : wire.columns()) {
    std::vector<int64_t>& values = reader.columns_.emplace_back(1, 0);
    values.reserve(wire.ranks());
    for (int i = 0; i + 1 < column.runs_size(); i += 2) {
      const int64_t room = wire.ranks() - static_cast<int64_t>(values.size());
      if (column.runs(i) < 1 || column.runs(i) > room) {
        return absl::InvalidArgumentError(
            "a column of a class of registrations is not as long "
            "as the class has ranks");
      }
      for (int64_t n = column.runs(i); n > 0; --n) {
        values.push_back(Plus(values.back(), column.runs(i + 1)));
      }
    }
    if (static_cast<int64_t>(values.size()) != wire.ranks()) {
      return absl::InvalidArgumentError(
          "a column of a class of registrations is not as long "
          "as the class has ranks");
    }
  }
  for (int32_t member = 0; member < reader.size_; ++member) {
    for (size_t i = 0; i < kOwn; ++i) {
      const int64_t value = reader.At(member, i);
      if (value >= 0 && value <= std::numeric_limits<int32_t>::max()) continue;
      return absl::InvalidArgumentError(
          absl::StrCat("a class of registrations has a rank, node or home lane of ", value));
    }
    if (member == 0 || reader.rank(member) > reader.rank(member - 1)) continue;
    return absl::InvalidArgumentError(absl::StrCat("a class of registrations has rank ",
                                                   reader.rank(member), " after ",
                                                   reader.rank(member - 1)));
  }
  return reader;
}

int64_t ClassReader::At(int32_t member, size_t i) const {
  const auto index = static_cast<int>(i);
  const uint32_t column = wire_->column_of(index);
  const int64_t first = wire_->numbers(index);
  return column == 0 ? first : Plus(first, columns_[column - 1][member]);
}

std::vector<int64_t*> NumbersIn(const v1::Registration& common,
                                scheduler::Registration& registration) {
  std::vector<int64_t*> places;
  places.reserve(CountNumbers(common));
  const auto add = [&](scheduler::Extents& numbers) {
    for (int64_t& number : numbers) places.push_back(&number);
  };
  const auto add_slice = [&](scheduler::Slice& slice) {
    places.push_back(&slice.offset_bytes);
    add(slice.strides);
  };
  for (int i = 0; i < common.fragments_size(); ++i) {
    scheduler::Fragment& fragment = registration.fragments[i];
    if (common.fragments(i).has_box()) {
      add(fragment.box.begin);
      add(fragment.box.end);
    }
    if (common.fragments(i).has_gradient()) add_slice(fragment.gradient);
    if (common.fragments(i).has_weight()) add_slice(fragment.weight);
  }
  return places;
}

}  // namespace dmuond
