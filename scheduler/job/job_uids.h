// Whose trainers may have part in whose job (--job_uids). A job belongs to the user whose trainer
// began it, for as long as there is something of it: in the daemons' memory, or in a snapshot.
#ifndef DMUOND_SCHEDULER_JOB_JOB_UIDS_H_
#define DMUOND_SCHEDULER_JOB_JOB_UIDS_H_

#include <algorithm>
#include <cstdint>
#include <vector>

namespace dmuond::scheduler {

struct JobUids {
  bool any = false;               // every user may come to every job
  std::vector<uint32_t> sharing;  // each of them may come to the others' jobs
  std::vector<uint32_t> admins;   // may come to every job

  [[nodiscard]] bool MayTakePart(uint32_t owner, uint32_t uid) const {
    const auto has = [](const std::vector<uint32_t>& uids, uint32_t one) {
      return std::find(uids.begin(), uids.end(), one) != uids.end();
    };
    return any || uid == owner || has(admins, uid) || (has(sharing, owner) && has(sharing, uid));
  }
};

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_JOB_JOB_UIDS_H_
