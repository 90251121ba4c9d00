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
    return uid == owner || MayInAll(uid) || (Has(sharing, owner) && Has(sharing, uid));
  }
  // Whoever's they are.
  [[nodiscard]] bool MayInAll(uint32_t uid) const { return any || Has(admins, uid); }

 private:
  static bool Has(const std::vector<uint32_t>& uids, uint32_t one) {
    return std::find(uids.begin(), uids.end(), one) != uids.end();
  }
};

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_JOB_JOB_UIDS_H_
