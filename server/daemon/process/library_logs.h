// gRPC and protobuf write their messages to stderr: unescaped, and waiting for its reader.
#ifndef DMUOND_SERVER_DAEMON_PROCESS_LIBRARY_LOGS_H_
#define DMUOND_SERVER_DAEMON_PROCESS_LIBRARY_LOGS_H_

namespace dmuond::server {

// Makes these messages lines of our log. Call it once, before either library does anything.
void LogForLibraries();

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_PROCESS_LIBRARY_LOGS_H_
