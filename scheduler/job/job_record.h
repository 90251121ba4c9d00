// A node's job as a value (dmuond/v1/record.proto): a successor of the daemon's process needs no
// more to go on without losing a step. A NodeJob is written in parts, and made again from all of
// them:
//
//   for (const RecordPart& part : job.RecordParts()) {
//     if (!written.contains(part)) job.WritePart(part, …);   // the others have not changed
//   }
//   absl::StatusOr<JobRecord> record = ParseJobRecord(bytes_of_all_parts);
//   absl::StatusOr<NodeJob> successor = NodeJob::FromRecord(options, *record, planned, now);
#ifndef DMUOND_SCHEDULER_JOB_JOB_RECORD_H_
#define DMUOND_SCHEDULER_JOB_JOB_RECORD_H_

#include <compare>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "dmuond/v1/record.pb.h"

namespace dmuond::scheduler {

using JobRecord = v1::JobRecord;

// A reader refuses records of a newer format.
inline constexpr int32_t kJobRecordFormat = 1;

// Names a part of a record. The bytes that a name stands for never change: when a part changes, its
// version is one that no part of the same kind and number has had before in this process.
struct RecordPart {
  enum class Kind : uint8_t {
    kProgress,
    kPlan,
    kRanks,
    kSession,
    kRegistration,
    kAttachment,
    kSnapshot,
    kSubmission,
    kNorms,
    kTrainerState
  };
  Kind kind = Kind::kProgress;
  uint64_t of = 0;  // its session id, rank or lane; 0 where a record has one part of this kind
  uint64_t version = 0;
  auto operator<=>(const RecordPart&) const = default;
};

// `bytes` are those of all parts, in any order. DATA_LOSS: they are no record. FAILED_PRECONDITION:
// a newer build has written them.
[[nodiscard]] absl::StatusOr<JobRecord> ParseJobRecord(const std::string& bytes);

// An error with its reason and metadata.
[[nodiscard]] v1::RecordedError ToRecord(const absl::Status& status);
[[nodiscard]] absl::Status StatusOf(const v1::RecordedError& record);

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_JOB_JOB_RECORD_H_
