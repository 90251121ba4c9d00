// The registrations of many trainers in few bytes. Trainers of one model say the same of its
// parameters, and differ in numbers alone: rank, node, home lane, boxes, offsets, strides. Those
// that do are a class, which says the rest once; and of the numbers most are equal too, or are
// those of another fragment shifted by something.
//
//   v1::Registration packed = Pack(registration);  // a daemon, to the coordinator
//   gathered.Set(packed);                          // the coordinator, of each rank
//   absl::Status added = gathered.AddTo(inputs);   // of all of them, into the plan's inputs
//   absl::StatusOr<v1::Registration> one = RegistrationOf(inputs, rank);  // byte for byte as it
//   was
//
// The numbers of a registration are, for each fragment in turn, those of its box (begin, end), of
// its gradient and of its weight (offset_bytes, strides), as far as the fragment has these.
// Threads: any; nothing is kept.
#ifndef DMUOND_SCHEDULER_CONVERT_REGISTRATIONS_H_
#define DMUOND_SCHEDULER_CONVERT_REGISTRATIONS_H_

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "dmuond/v1/peer.pb.h"
#include "scheduler/layout.h"

namespace dmuond {

// The registration with `common` and `numbers` in place of what the trainer said. Who compares two
// need not read what they have in common, and who has many keeps that once.
[[nodiscard]] v1::Registration Pack(v1::Registration registration);
// INVALID_ARGUMENT where it cannot have come from Pack().
[[nodiscard]] absl::StatusOr<v1::Registration> Unpack(const v1::Registration& packed);

// What has been registered while others are awaited. Of each trainer it keeps how its numbers
// differ from those of the first one of its class: a thousand of one model take ten times as much
// as one.
class GatheredRegistrations {
 public:
  // Packed or not; false: the rank's is the same already.
  bool Set(const v1::Registration& registration);
  void Erase(int32_t rank) { by_rank_.erase(rank); }
  [[nodiscard]] bool Contains(int32_t rank) const { return by_rank_.contains(rank); }
  [[nodiscard]] size_t size() const { return by_rank_.size(); }
  void Clear() { *this = {}; }

  // Those of one class as a class, the others as they are. INVALID_ARGUMENT as Unpack().
  [[nodiscard]] absl::Status AddTo(v1::PlanInputs& inputs) const;

 private:
  struct Class {
    std::vector<int64_t> numbers;  // of the first one, which may have gone since
  };
  struct Member {
    int32_t of_class = -1;    // into classes_
    v1::Registration rest;    // what is neither common nor a number
    std::string differences;  // numbers less those of the class
  };
  [[nodiscard]] std::vector<int64_t> NumbersOf(const Member& member) const;
  absl::Status AddClass(const std::string& common, const std::vector<const Member*>& members,
                        v1::PlanInputs& inputs) const;

  std::vector<Class> classes_;
  absl::flat_hash_map<std::string, int32_t> class_of_;  // Registration.common -> into classes_
  std::map<int32_t, Member> by_rank_;
};

// How many trainers have registered.
[[nodiscard]] int32_t WorldSizeOf(const v1::PlanInputs& inputs);

// The registration of one rank, perhaps without its numbers. World size, groups and bucket size are
// equal in all of them. Empty where nobody has registered.
[[nodiscard]] const v1::Registration& AnyOf(const v1::PlanInputs& inputs);

// NOT_FOUND: the rank has not registered. INVALID_ARGUMENT: a class that says less or more than it
// should.
[[nodiscard]] absl::StatusOr<v1::Registration> RegistrationOf(const v1::PlanInputs& inputs,
                                                              int32_t rank);

// A class, read: numbers by rank without copies of the rest.
class ClassReader {
 public:
  // INVALID_ARGUMENT: numbers that do not fit the class, ranks that do not ascend, or more of
  // anything than a job can have. `wire` must outlive this.
  [[nodiscard]] static absl::StatusOr<ClassReader> Make(const v1::RegistrationClass& wire);

  [[nodiscard]] int32_t size() const { return size_; }
  [[nodiscard]] int32_t rank(int32_t member) const { return Int(member, 0); }
  [[nodiscard]] int32_t node(int32_t member) const { return Int(member, 1); }
  [[nodiscard]] int32_t home_lane(int32_t member) const { return Int(member, 2); }
  // The i-th number of the member's fragments.
  [[nodiscard]] int64_t number(int32_t member, size_t i) const { return At(member, i + 3); }
  [[nodiscard]] const v1::Registration& common() const { return wire_->common(); }

 private:
  [[nodiscard]] int64_t At(int32_t member, size_t i) const;
  [[nodiscard]] int32_t Int(int32_t member, size_t i) const {
    return static_cast<int32_t>(At(member, i));
  }

  const v1::RegistrationClass* wire_ = nullptr;
  int32_t size_ = 0;
  std::vector<std::vector<int64_t>> columns_;  // by member: beyond the first's
};

// The places in `registration`, made of `common` by FromProto(), of the numbers of its fragments,
// in their order. They hold until its fragments change in number.
[[nodiscard]] std::vector<int64_t*> NumbersIn(const v1::Registration& common,
                                              scheduler::Registration& registration);

}  // namespace dmuond

#endif  // DMUOND_SCHEDULER_CONVERT_REGISTRATIONS_H_
