// The commit that a program is built of. It is in a source of its own, which programs alone link,
// so that a commit compiles and links little.
#ifndef DMUOND_SERVER_COMMIT_H_
#define DMUOND_SERVER_COMMIT_H_

namespace dmuond::server {

extern const char kBuildCommit[];  // "2796315d1c3a", with "-dirty" after changes; or "unknown"

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_COMMIT_H_
