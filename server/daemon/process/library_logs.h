// What gRPC and protobuf have to say, they say on stderr: unescaped, and waiting for its reader.
#ifndef DMUOND_SERVER_DAEMON_PROCESS_LIBRARY_LOGS_H_
#define DMUOND_SERVER_DAEMON_PROCESS_LIBRARY_LOGS_H_

namespace dmuond::server {

// From now on it comes as lines of our log. Once, before either does anything.
void LogForLibraries();

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_PROCESS_LIBRARY_LOGS_H_
