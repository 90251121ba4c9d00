#include "server/daemon/metrics/html.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "scheduler/shown.h"

namespace dmuond::server {
namespace {

// Light and dark as the browser is set; narrow windows put one thing under the other, and wide
// tables scroll in their own box. c0 to c3 are the phases of a step.
constexpr char kStyle[] = R"(
:root{color-scheme:light dark;--page:#fff;--box:#f6f7f9;--line:#d8dce2;--ink:#1b1f24;--dim:#5a6472;
--good:#13733b;--bad:#b3261e;--c0:#2a6fdb;--c1:#c77700;--c2:#0f8f6b;--c3:#8250c4}
@media(prefers-color-scheme:dark){:root{--page:#14171b;--box:#1d2127;--line:#363c45;--ink:#e6e9ed;
--dim:#9aa4b1;--good:#5fce8c;--bad:#ff8a80;--c0:#6aa3ff;--c1:#f0a63a;--c2:#3ccaa0;--c3:#b492f0}}
*{box-sizing:border-box}
body{margin:0 auto;padding:1rem;max-width:75rem;background:var(--page);color:var(--ink);
font:15px/1.45 system-ui,sans-serif}
h1{font-size:1.3rem;margin:0 0 .2rem}h2{font-size:1rem;margin:1.6rem 0 .4rem}
p{margin:.3rem 0}a{color:var(--c0)}.dim{color:var(--dim)}
.good,.bad{padding:.6rem .8rem;border-left:.35rem solid;background:var(--box)}
.good{border-color:var(--good)}.bad{border-color:var(--bad)}.bad ul{margin:.2rem 0;padding-left:1.2rem}
dl{display:grid;grid-template-columns:repeat(auto-fill,minmax(9.5rem,1fr));gap:.6rem;margin:.8rem 0}
dl div{background:var(--box);padding:.5rem .7rem}dt{color:var(--dim);font-size:.85rem}
dd{margin:0;font-size:1.15rem;font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:.2rem .8rem .2rem 0;border-bottom:1px solid var(--line);
white-space:nowrap}th{color:var(--dim);font-weight:normal}.n{text-align:right}
svg{display:block;width:100%;height:10rem;background:var(--box)}
.labels{display:flex;justify-content:space-between;color:var(--dim);font-size:.8rem}
.key{display:inline-block;width:.7rem;height:.7rem;margin-right:.35rem}
.c0{fill:var(--c0);background:var(--c0)}.c1{fill:var(--c1);background:var(--c1)}
.c2{fill:var(--c2);background:var(--c2)}.c3{fill:var(--c3);background:var(--c3)}
pre{background:var(--box);padding:.6rem;overflow-x:auto;font-size:.8rem;margin:0}
.bound{stroke:var(--ink);vector-effect:non-scaling-stroke}
)";

}  // namespace

std::string Html(absl::string_view text) {
  return absl::StrReplaceAll(
      scheduler::Shown(text),
      {{"&", "&amp;"}, {"<", "&lt;"}, {">", "&gt;"}, {"\"", "&quot;"}, {"'", "&#39;"}});
}

std::string HtmlPage(absl::string_view title, absl::string_view body, bool refreshes) {
  return absl::StrCat(
      "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">"
      "<meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">",
      refreshes ? "<meta http-equiv=\"refresh\" content=\"5\">" : "", "<title>", Html(title),
      "</title><style>", kStyle, "</style></head><body>\n", body, "</body></html>\n");
}

}  // namespace dmuond::server
