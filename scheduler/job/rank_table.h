// The ranks of one job that run on one node: which of them has a session, how far it has come, and
// what a replacement must know of its predecessor. Pure.
//
//                open  register    attach  tell      goes back        acknowledge  ends
//   Empty        Open  x           x       x         Empty            x            x
//   Vacant       Open  x           x       x         Vacant           x            x
//   Open         x     Registered  x       x         Open             x            (1)
//   Registered   x     Registered  Mapped  x         Registered       x            (1)
//   Mapped       x     x           Mapped  Attached  Mapped           x            (1)
//   Attached     x     x           x       Attached  MustAcknowledge  x            (1)
//   MustAcknow.  x     x           x       x         MustAcknowledge  Attached     (1)
//
// (1) Vacant where the trainer has died and may be replaced; else Empty. x: impossible
// (impossible.h). A layout that is refused brings every session back to Open.
//
// A session is Mapped when every lane has mapped its memory: its trainer can submit. It is Attached
// when its trainer has been told so, with the step that it begins at. Before that its trainer need
// not hear that the job goes back.
#ifndef DMUOND_SCHEDULER_JOB_RANK_TABLE_H_
#define DMUOND_SCHEDULER_JOB_RANK_TABLE_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "dmuond/v1/lane.pb.h"
#include "dmuond/v1/peer.pb.h"
#include "dmuond/v1/record.pb.h"
#include "scheduler/job/job_record.h"
#include "scheduler/layout.h"
#include "scheduler/step.h"
#include "scheduler/types.h"

namespace dmuond::scheduler {

// A rollback: the job goes back to a step, and its trainers hear so.
struct Rollback {
  int64_t to_step = 0;
  uint32_t epoch = 0;  // began with it, and with no other rollback; 0: there was no rollback
  // Somebody has loaded a snapshot. Else memory was lost, and a trainer that stands at this step
  // need not hear of it.
  bool asked = false;

  bool operator==(const Rollback& other) const {
    return to_step == other.to_step && epoch == other.epoch;
  }
};
[[nodiscard]] v1::RecordedRollback ToRecord(const Rollback& back);
[[nodiscard]] Rollback RollbackOf(const v1::RecordedRollback& record);

class RankTable {
 public:
  enum class State : uint8_t {
    kEmpty,
    kVacant,
    kOpen,
    kRegistered,
    kMapped,
    kAttached,
    kMustAcknowledge
  };

  // A trainer of this node, from OpenSession until it closes or is gone.
  struct Session {
    uint64_t id = 0;  // given by the caller of Open(); no two sessions have the same
    int32_t rank = 0;
    uint64_t incarnation = 0;  // of the rank: 1, 2, …
    int64_t pid = 0;           // for people; 0: it has none here
    uint32_t uid = 0;          // user that its process is of
    bool end_is_seen = true;   // the daemon sees when its process ends
    std::string client;        // "dmuond-python 1.2", for messages to people
    int32_t home_lane = 0;
    bool discards = false;  // RESUME_DISCARD
    State state = State::kOpen;

    v1::Registration registration;               // as sent to the coordinator
    std::shared_ptr<const Registration> layout;  // the same, parsed; null: not registered
    absl::Status refused;                        // why the whole layout was refused last
    int64_t refusals = 0;                        // how often the layout was refused
    std::set<LaneIndex> lanes_mapped;            // lanes that have mapped the trainer's memory
    absl::Status map_error;                      // why a lane cannot map it
    std::vector<std::string> weight_digests;     // AttachBuffersRequest's
    bool broadcast = false;                      // AttachBuffersRequest's
    Attempt first_attempt;                       // the one that was open when it was mapped
    std::optional<Rollback> must_acknowledge;    // in kMustAcknowledge
    std::optional<Rollback> acknowledged;        // the last one
    uint64_t changed = 0;                        // version() when it changed last
    uint64_t registered = 0;                     // version() when its registration changed last
    // It can submit.
    [[nodiscard]] bool mapped() const { return state >= State::kMapped; }
  };

  // The place of a trainer that has died, until its replacement is mapped.
  struct Vacancy {
    std::string client;    // of the dead trainer
    uint64_t session = 0;  // id of its session
    Attempt attempt;       // the open one that ended by its death; 0: none did
  };

  [[nodiscard]] State StateOf(int32_t rank) const;
  [[nodiscard]] const std::map<uint64_t, Session>& sessions() const { return sessions_; }
  [[nodiscard]] bool empty() const { return sessions_.empty(); }
  // Null: there is none.
  [[nodiscard]] const Session* Find(uint64_t id) const;
  [[nodiscard]] const Session* OfRank(int32_t rank) const;
  [[nodiscard]] const Vacancy* VacancyOf(int32_t rank) const;
  [[nodiscard]] const std::map<int32_t, Vacancy>& vacancies() const { return vacancies_; }

  // Gives the session its incarnation. REQUIRES: the rank is Empty or Vacant.
  const Session& Open(Session session);
  // REQUIRES: the session is Open or, with the same layout, Registered.
  void Register(uint64_t id, v1::Registration registration,
                std::shared_ptr<const Registration> layout);
  // The coordinator has refused the layout that the ranks have registered together.
  void RefuseAll(const absl::Status& why);

  // Lanes are to map the memory of a session by this command, and so are lanes that replace them.
  void BeginMapping(uint64_t id, v1::LaneCommand command);
  void OnLaneMapped(int32_t rank, uint64_t incarnation, LaneIndex lane, const std::string& error);
  // Lanes are replaced, and the new ones have mapped nothing.
  void ForgetMappings();
  // By rank: the command that maps what its trainer has attached. A dead trainer's stays until it
  // is dropped.
  [[nodiscard]] const std::map<int32_t, v1::LaneCommand>& attachments() const {
    return attachments_;
  }
  // Whether what the session has attached, or is attaching, is for its own process alone: memory of
  // the process, or the daemon's where nobody sees when the process ends and writes no more.
  [[nodiscard]] bool HasOwnMemory(const Session& session) const;
  // Forgets what the rank's trainer has attached.
  void DropAttachment(int32_t rank) {
    attachments_.erase(rank);
    attached_.erase(rank);
    ++version_;
  }
  // Every lane has mapped the session's memory. The rank is not vacant any more.
  void Attach(uint64_t id, Attempt open, std::vector<std::string> weight_digests, bool broadcast);
  // The session's trainer hears that it is attached.
  void Tell(uint64_t id);

  void GoBack(const Rollback& back);
  void Acknowledge(uint64_t id);

  // The session ends. `vacant` has a value if its trainer has died and may be replaced: the attempt
  // that ends by its death.
  Session End(uint64_t id, std::optional<Attempt> vacant);
  // Keeps the news of a session's end that the coordinator was told; of each rank the last.
  void KeepGone(const v1::RankGone& gone) {
    gone_[gone.rank()] = gone;
    table_changed_ = ++version_;
  }
  [[nodiscard]] const std::map<int32_t, v1::RankGone>& gone() const { return gone_; }
  // In a new epoch every attempt is newer than those in which trainers have died.
  void VacanciesEndNothing();
  // The job ends. Incarnations are counted on.
  void Clear();

  // ---- the record ----
  // Grows with every change.
  [[nodiscard]] uint64_t version() const { return version_; }
  // The parts that it is written in, ascending: ranks, sessions, registrations, attachments. Holds
  // until the next change. Steps change nothing here, and the list is not made anew for them.
  [[nodiscard]] const std::vector<RecordPart>& Parts() const;
  // REQUIRES: it is one of Parts().
  void WritePart(const RecordPart& part, JobRecord& record) const;
  // INVALID_ARGUMENT: no table has written it.
  [[nodiscard]] static absl::StatusOr<RankTable> FromRecord(const JobRecord& record);

 private:
  [[nodiscard]] Session& At(uint64_t id) { return sessions_.at(id); }
  void Changed(Session& session) { session.changed = ++version_; }
  // As Impossible() (impossible.h). Always false.
  bool Refuse(const Session& session, const char* event) const;

  std::map<uint64_t, Session> sessions_;            // by id
  std::map<int32_t, Vacancy> vacancies_;            // by rank
  std::map<int32_t, uint64_t> incarnations_;        // by rank: the newest
  std::map<int32_t, v1::LaneCommand> attachments_;  // by rank
  std::map<int32_t, uint64_t> attached_;            // by rank: version() of its attachment
  std::map<int32_t, v1::RankGone> gone_;            // by rank
  uint64_t version_ = 0;
  uint64_t table_changed_ = 0;  // version() when vacancies, incarnations or gone_ changed last
  mutable std::vector<RecordPart> parts_;  // Parts() of parts_version_
  mutable std::optional<uint64_t> parts_version_;
};

[[nodiscard]] const char* Name(RankTable::State state);

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_JOB_RANK_TABLE_H_
