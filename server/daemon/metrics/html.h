// Text that others have written, for a page.
#ifndef DMUOND_SERVER_DAEMON_METRICS_HTML_H_
#define DMUOND_SERVER_DAEMON_METRICS_HTML_H_

#include <string>

#include "absl/strings/string_view.h"

namespace dmuond::server {

// Safe between tags and in a quoted attribute, and on one line (scheduler/shown.h).
[[nodiscard]] std::string Html(absl::string_view text);

// A whole page: `title` is plain text, `body` is HTML. With `refreshes` it loads itself anew every
// five seconds.
[[nodiscard]] std::string HtmlPage(absl::string_view title, absl::string_view body, bool refreshes);

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_METRICS_HTML_H_
