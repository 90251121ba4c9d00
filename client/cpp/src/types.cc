#include "dmuond/client/types.h"

namespace dmuond::client {

const char* Name(Route route) {
  switch (route) {
    case Route::kMuon:
      return "muon";
    case Route::kAdamW:
      return "adamw";
    case Route::kTrainer:
      return "trainer";
  }
  return "unknown";
}

const char* Name(Outcome::Kind kind) {
  switch (kind) {
    case Outcome::Kind::kPending:
      return "pending";
    case Outcome::Kind::kCommitted:
      return "committed";
    case Outcome::Kind::kSkipped:
      return "skipped";
    case Outcome::Kind::kAborted:
      return "aborted";
    case Outcome::Kind::kRolledBack:
      return "rolled back";
  }
  return "unknown";
}

int64_t Elements(const Box& box) {
  int64_t count = 1;
  for (size_t d = 0; d < box.begin.size(); ++d) count *= box.end[d] - box.begin[d];
  return count;
}

}  // namespace dmuond::client
