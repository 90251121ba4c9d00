#include "scheduler/job/job_record.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "scheduler/reason.h"

namespace dmuond::scheduler {

absl::StatusOr<JobRecord> ParseJobRecord(const std::string& bytes) {
  JobRecord record;
  if (!record.ParseFromString(bytes) || !record.has_progress()) {
    return absl::DataLossError(absl::StrCat(bytes.size(), " bytes are no record of a job"));
  }
  if (record.format() != kJobRecordFormat) {
    return absl::FailedPreconditionError(absl::StrCat(
        "the job's record has format ", record.format(), "; this build reads ", kJobRecordFormat));
  }
  return record;
}

v1::RecordedError ToRecord(const absl::Status& status) {
  v1::RecordedError record;
  record.set_code(status.raw_code());
  record.set_message(std::string(status.message()));
  record.set_reason(ReasonOf(status));
  for (auto& [name, value] : MetadataOf(status)) {
    v1::RecordedError::Value& entry = *record.add_metadata();
    entry.set_name(name);
    entry.set_value(value);
  }
  return record;
}

absl::Status StatusOf(const v1::RecordedError& record) {
  const absl::Status status(static_cast<absl::StatusCode>(record.code()), record.message());
  if (status.ok()) return absl::OkStatus();
  Metadata metadata;
  for (const v1::RecordedError::Value& entry : record.metadata()) {
    metadata.emplace_back(entry.name(), entry.value());
  }
  return WithMetadata(record.reason().empty() ? status : WithReason(status, record.reason()),
                      metadata);
}

}  // namespace dmuond::scheduler
