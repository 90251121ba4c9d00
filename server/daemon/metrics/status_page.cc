#include "server/daemon/metrics/status_page.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "scheduler/convert/convert.h"
#include "scheduler/shown_pid.h"
#include "server/common/human.h"
#include "server/daemon/metrics/html.h"
#include "server/daemon/metrics/seen_job.h"
#include "server/daemon/node_view.h"
#include "server/plan_summary.h"

namespace dmuond::server {
namespace {

using SteadyTime = std::chrono::steady_clock::time_point;
using scheduler::JobFigures;

// The last phase, quiet, spans others and is no part of the sum.
constexpr size_t kStacked = scheduler::kPhases - 1;
constexpr size_t kMatricesShown = 12;
constexpr size_t kWeakestShown = 6;
constexpr int kLanesNamed = 32;  // in the table; the picture has all
// A step takes at most minutes: somebody wants to look.
constexpr std::chrono::minutes kNoProgressFor{10};
// Daemons beat once a second.
constexpr std::chrono::seconds kSilentFor{5};

std::string Ago(SteadyTime moment) {
  const auto age = std::chrono::steady_clock::now() - moment;
  return HumanSeconds(std::chrono::duration_cast<std::chrono::seconds>(age).count());
}

std::string Human(double seconds) { return HumanMicroseconds(seconds * 1e6); }

class Rows {
 public:
  // '>' before a name: numbers, to the right.
  Rows(std::initializer_list<absl::string_view> columns) {
    text_ = "<div class=\"scroll\"><table><tr>";
    for (absl::string_view column : columns) {
      right_.push_back(absl::ConsumePrefix(&column, ">"));
      absl::StrAppend(&text_, right_.back() ? "<th class=\"n\">" : "<th>", column, "</th>");
    }
    text_ += "</tr>\n";
  }
  // Plain text.
  void Add(std::initializer_list<absl::string_view> cells) {
    text_ += "<tr>";
    size_t i = 0;
    for (const absl::string_view cell : cells) {
      absl::StrAppend(&text_, right_[i++] ? "<td class=\"n\">" : "<td>", Html(cell), "</td>");
    }
    text_ += "</tr>\n";
  }
  [[nodiscard]] std::string Text() const { return text_ + "</table></div>\n"; }

 private:
  std::vector<bool> right_;
  std::string text_;
};

// ---- is it all right? ----

void AddJobTroubles(const SeenJob& job, std::vector<std::string>& troubles) {
  const std::string who = absl::StrCat("job ", job.status.name());
  if (job.status.state() == "failed") {
    troubles.push_back(absl::StrCat(who, " has failed; its trainers hear why"));
  }
  for (const v1::Awaited& awaited : job.status.awaited()) {
    troubles.push_back(absl::StrCat(
        who, " has waited for ", HumanSeconds(awaited.since_ms() / 1000), " for ", awaited.what()));
  }
  if (!job.status.snapshot_error().empty()) {
    troubles.push_back(
        absl::StrCat(who, ": its newest snapshot failed: ", job.status.snapshot_error()));
  }
  const JobFigures& figures = job.figures;
  if (figures.began.has_value()) {
    const SteadyTime since = figures.progressed.value_or(*figures.began);
    if (std::chrono::steady_clock::now() - since > kNoProgressFor) {
      troubles.push_back(absl::StrCat(who, " has had no step for ", Ago(since)));
    }
  }
  int absent = 0;
  for (const v1::LaneStatus& lane : job.lanes) absent += lane.state() != "ready" ? 1 : 0;
  if (absent > 0) {
    troubles.push_back(absl::StrCat(who, ": ", absent, " of ", job.lanes.size(),
                                    " lanes of this node are not ready"));
  }
  if (!std::isfinite(figures.gradient_norm)) {
    troubles.push_back(absl::StrCat(who, ": gradients of the last step were not finite"));
  }
}

const Core::Seen& OldestOf(const std::vector<Core::Seen>& places) {
  return *std::max_element(places.begin(), places.end(),
                           [](const auto& a, const auto& b) { return a.age < b.age; });
}

std::vector<std::string> Troubles(const std::vector<Core::Seen>& places) {
  const Core::Seen& seen = OldestOf(places);
  const v1::GetStatusReply& status = seen.view->status;
  std::vector<std::string> troubles;
  if (seen.age.count() > 0) {
    troubles.push_back(absl::StrCat("this page is ", HumanSeconds(seen.age.count() / 1000),
                                    " old: the daemon's core has not turned since"));
  }
  if (status.missing_nodes_size() > 0) {
    troubles.push_back(absl::StrCat("the group has not formed; missing: node ",
                                    absl::StrJoin(status.missing_nodes(), ", ")));
  } else if (!status.not_joined().empty()) {
    troubles.push_back(absl::StrCat("not in the group: ", status.not_joined()));
  } else if (status.epoch() == 0) {
    troubles.emplace_back("the group has not formed");
  }
  if (status.group_state() == "draining") troubles.emplace_back("this daemon is leaving");
  for (const auto& [node, heard] : seen.view->heard) {
    if (std::chrono::steady_clock::now() - heard > kSilentFor + seen.age) {
      troubles.push_back(absl::StrCat("node ", node, " has not been heard of for ", Ago(heard)));
    }
  }
  for (const Core::Seen& place : places) {
    const std::string& hangs = place.view->status.snapshot_dir_hangs();
    if (hangs.empty()) continue;
    troubles.push_back(absl::StrCat("the snapshot directory hangs: ", hangs));
    break;
  }
  for (const SeenJob& job : JobsOf(places)) AddJobTroubles(job, troubles);
  return troubles;
}

std::string Verdict(const std::vector<std::string>& troubles, size_t jobs) {
  if (troubles.empty()) {
    return absl::StrCat("<div class=\"good\" id=\"verdict\"><strong>All right.</strong> ",
                        jobs == 0   ? "No job runs here, and nobody is missing."
                        : jobs == 1 ? "The job runs, and nobody is missing."
                                    : "The jobs run, and nobody is missing.",
                        "</div>\n");
  }
  std::string text = "<div class=\"bad\" id=\"verdict\"><strong>Look here:</strong><ul>";
  for (const std::string& trouble : troubles)
    absl::StrAppend(&text, "<li>", Html(trouble), "</li>");
  return text + "</ul></div>\n";
}

// ---- a job ----

std::string Tiles(const SeenJob& job, bool snapshots) {
  const JobFigures& figures = job.figures;
  std::vector<std::pair<const char*, std::string>> tiles = {
      {"state", job.status.state()},
      {"step", absl::StrCat(job.status.last_committed_step())},
      {"last step", figures.progressed ? Ago(*figures.progressed) + " ago" : "none yet"},
      {"durable step", job.status.has_durable_step() ? absl::StrCat(job.status.durable_step())
                       : snapshots                   ? "none"
                                                     : "no snapshots are made"},
      {"gradient norm", absl::StrFormat("%.4g", figures.gradient_norm)},
      {"clip coefficient", absl::StrFormat("%.4g", figures.clip_coefficient)},
      {"skipped, aborted", absl::StrCat(figures.skipped_steps, ", ", figures.aborted_attempts)},
      {"went back", absl::StrCat(figures.rollbacks, figures.rollbacks == 1 ? " time" : " times")}};
  if (snapshots) {
    tiles.emplace_back("snapshots failed, left out", absl::StrCat(figures.snapshots_failed, ", ",
                                                                  job.status.snapshots_left_out()));
  }
  std::string text = "<dl>";
  for (const auto& [name, value] : tiles) {
    absl::StrAppend(&text, "<div><dt>", name, "</dt><dd>", Html(value), "</dd></div>");
  }
  return text + "</dl>\n";
}

// Bars that fill the window's width, of `columns` columns; words stand above and below, so that
// they are as large in a narrow window.
std::string Chart(const std::string& top, size_t columns, const std::string& label,
                  const std::string& bars, const std::string& first, const std::string& last) {
  return absl::StrCat("<div class=\"labels\"><span>", top,
                      "</span></div><svg preserveAspectRatio=\"none\" viewBox=\"0 0 ", columns,
                      " 100\" role=\"img\" aria-label=\"", label, "\">\n", bars,
                      "</svg><div class=\"labels\"><span>", first, "</span><span>", last,
                      "</span></div>\n");
}

std::string StepsChart(const std::vector<JobFigures::StepTimes>& steps) {
  double longest = 0;
  for (const JobFigures::StepTimes& step : steps) {
    double sum = 0;
    for (size_t i = 0; i < kStacked; ++i) sum += step.seconds[i];
    longest = std::max(longest, sum);
  }
  if (longest <= 0) return "";
  std::string text;
  size_t x = 0;
  for (const JobFigures::StepTimes& step : steps) {
    double y = 100;
    std::string title = absl::StrCat("step ", step.step);
    std::string bars;
    for (size_t i = 0; i < kStacked; ++i) {
      const double height = step.seconds[i] / longest * 100;
      y -= height;
      absl::StrAppendFormat(
          &bars, "<rect class=\"c%d\" x=\"%d\" y=\"%.2f\" width=\".9\" height=\"%.2f\"/>", i, x, y,
          height);
      absl::StrAppend(&title, ", ", scheduler::kPhaseNames[i], " ", Human(step.seconds[i]));
    }
    absl::StrAppend(&text, "<g><title>", title, "</title>", bars, "</g>\n");
    ++x;
  }
  return Chart(Human(longest), steps.size(),
               absl::StrCat("time of the last ", steps.size(), " steps, by part; the longest took ",
                            Human(longest)),
               text, absl::StrCat("step ", steps.front().step),
               absl::StrCat("step ", steps.back().step));
}

std::string Steps(const SeenJob& job) {
  const std::vector<JobFigures::StepTimes> steps = job.figures.RecentSteps();
  if (steps.empty()) return "";
  std::string text = absl::StrCat("<h2>Where the time of the last ", steps.size(),
                                  " steps went</h2>\n", StepsChart(steps));
  text +=
      "<div class=\"scroll\"><table><tr><th>part</th><th class=\"n\">last</th><th class=\"n\">"
      "median</th><th class=\"n\">longest</th><th>what it is</th></tr>\n";
  constexpr std::array<const char*, scheduler::kPhases> kMeaning = {
      "from the first gradient to the last, the backward pass included",
      "from this node's vote to the decision", "momentum, Newton-Schulz, AdamW",
      "until the last new weights were there",
      "all that trainers wait for: from the last gradient to the last new weights"};
  for (size_t i = 0; i < scheduler::kPhases; ++i) {
    std::vector<float> times;
    times.reserve(steps.size());
    for (const JobFigures::StepTimes& step : steps) times.push_back(step.seconds[i]);
    std::sort(times.begin(), times.end());
    absl::StrAppend(
        &text, "<tr><td>", i < kStacked ? absl::StrCat("<span class=\"key c", i, "\"></span>") : "",
        scheduler::kPhaseNames[i], "</td><td class=\"n\">", Human(steps.back().seconds[i]),
        "</td><td class=\"n\">", Human(times[times.size() / 2]), "</td><td class=\"n\">",
        Human(times.back()), "</td><td>", kMeaning[i], "</td></tr>\n");
  }
  return text + "</table></div>\n";
}

// One bar for each lane of the group, and the least time that any plan could give as a line.
std::string BalanceChart(const v1::GetPlanReply& plan, const std::vector<double>& loads) {
  const double longest = *std::max_element(loads.begin(), loads.end());
  if (longest <= 0) return "";
  std::string text;
  for (size_t i = 0; i < loads.size(); ++i) {
    const double height = loads[i] / longest * 100;
    absl::StrAppendFormat(&text,
                          "<rect class=\"c2\" x=\"%d\" y=\"%.2f\" width=\".9\" "
                          "height=\"%.2f\"><title>lane %d: %s</title></rect>\n",
                          i, 100 - height, height, i, HumanMicroseconds(loads[i]));
  }
  absl::StrAppendFormat(&text, "<line class=\"bound\" x1=\"0\" x2=\"%d\" y1=\"%.2f\" y2=\"%.2f\"/>",
                        loads.size(), 100 - plan.lower_bound_us() / longest * 100,
                        100 - plan.lower_bound_us() / longest * 100);
  return Chart(HumanMicroseconds(longest), loads.size(),
               absl::StrCat("estimated update time of each of ", loads.size(), " lanes"), text,
               "lane 0", absl::StrCat("lane ", loads.size() - 1));
}

std::string Balance(const SeenJob& job) {
  if (job.planned.plan == nullptr) return "";
  const v1::GetPlanReply plan = Summarize(*job.planned.plan);
  std::string text = absl::StrCat(
      "<h2>Who owns what</h2>\n<p class=\"dim\">Estimated time of each lane's update, of all "
      "nodes. "
      "The slowest takes ",
      absl::StrFormat("%.3f", plan.imbalance()),
      " times the mean; the line is what no assignment can beat.</p>\n",
      BalanceChart(plan, job.planned.plan->lane_load_us));
  Rows lanes({">lane", ">update (est.)", ">memory (est.)", ">matrices", ">pieces", "state",
              ">restarts", "device"});
  for (const v1::GetPlanReply::Lane& lane : plan.lanes()) {
    const auto here = std::find_if(job.lanes.begin(), job.lanes.end(), [&](const auto& status) {
      return status.lane() == lane.lane();
    });
    const bool is_here = here != job.lanes.end();
    if (!is_here && lane.lane() >= kLanesNamed) continue;
    lanes.Add({absl::StrCat(lane.lane()), HumanMicroseconds(lane.load_us()),
               HumanBytes(lane.memory_bytes()), absl::StrCat(lane.matrices()),
               absl::StrCat(lane.pieces()), is_here ? here->state() : "another node's",
               is_here ? absl::StrCat(here->restarts()) : "", is_here ? here->device() : ""});
  }
  absl::StrAppend(&text, lanes.Text());
  if (plan.lanes_size() > kLanesNamed) {
    absl::StrAppend(&text, "<p class=\"dim\">Of ", plan.lanes_size(),
                    " lanes, the table has this node's and the first ", kLanesNamed, ".</p>\n");
  }
  return text;
}

std::string Matrices(const SeenJob& job) {
  std::vector<SeenMatrix> matrices = MatricesOf(job);
  if (matrices.empty()) return "";
  std::sort(matrices.begin(), matrices.end(),
            [](const SeenMatrix& a, const SeenMatrix& b) { return a.norm > b.norm; });
  const double median = matrices[matrices.size() / 2].norm;
  const auto table = [&](const std::vector<const SeenMatrix*>& shown) {
    Rows rows(
        {"parameter", ">matrix", ">gradient norm", ">of the median", ">update RMS", ">owner"});
    for (const SeenMatrix* seen : shown) {
      const scheduler::Unit& unit = *seen->matrix;
      rows.Add({job.planned.inputs->layout.parameters[unit.parameter].name,
                absl::StrCat(unit.rows, " × ", unit.cols), absl::StrFormat("%.4g", seen->norm),
                median > 0 ? absl::StrFormat("%.2f", seen->norm / median) : "",
                seen->update_rms.has_value() ? absl::StrFormat("%.4f", *seen->update_rms) : "",
                absl::StrCat("lane ", unit.owner.value())});
    }
    return rows.Text();
  };
  const auto zeros = std::count_if(matrices.begin(), matrices.end(),
                                   [](const SeenMatrix& matrix) { return matrix.norm == 0; });
  std::vector<const SeenMatrix*> largest;
  std::vector<const SeenMatrix*> weakest;
  for (const SeenMatrix& matrix : matrices) {
    if (largest.size() < kMatricesShown) largest.push_back(&matrix);
    if (matrix.update_rms.has_value()) weakest.push_back(&matrix);
  }
  // One whose update is not a number comes first.
  std::stable_sort(weakest.begin(), weakest.end(), [](const SeenMatrix* a, const SeenMatrix* b) {
    return *a->update_rms < *b->update_rms ||
           (std::isnan(*a->update_rms) && !std::isnan(*b->update_rms));
  });
  weakest.resize(std::min(weakest.size(), kWeakestShown));
  std::string text =
      absl::StrCat("<h2>Matrices that stand out</h2>\n<p class=\"dim\">The ", largest.size(),
                   " largest gradient norms of the ", matrices.size(),
                   " matrices that this node owns, before clipping; ", zeros,
                   " have a gradient of zero.</p>\n", table(largest));
  if (!weakest.empty()) {
    absl::StrAppend(&text, "<p class=\"dim\">The ", weakest.size(),
                    " smallest updates, root mean square before the learning rate: an input of low "
                    "rank makes them small.</p>\n",
                    table(weakest));
  }
  return text;
}

std::string Trainers(const SeenJob& job) {
  Rows trainers({">rank", ">pid", "state", ">incarnation", "client"});
  for (const v1::TrainerStatus& trainer : job.status.trainers()) {
    trainers.Add({absl::StrCat(trainer.rank()), scheduler::ShownPid(trainer.pid()), trainer.state(),
                  absl::StrCat(trainer.incarnation()), trainer.client()});
  }
  return absl::StrCat("<h2>Trainers of this node: ", job.status.trainers_size(), " of ",
                      job.status.world_size(), "</h2>\n",
                      job.status.trainers_size() > 0 ? trainers.Text() : "");
}

std::string JobPart(const SeenJob& job, bool snapshots) {
  return absl::StrCat("<section><h2>Job ", Html(job.status.name()), "</h2>\n",
                      Tiles(job, snapshots), Steps(job), Balance(job), Matrices(job), Trainers(job),
                      "</section>\n");
}

std::string Nodes(const NodeView& view) {
  if (view.heard.empty()) return "";
  Rows nodes({">node", ">heard of"});
  for (const auto& [node, heard] : view.heard) {
    const auto age = std::chrono::steady_clock::now() - heard;
    nodes.Add({absl::StrCat(node),
               absl::StrFormat("%.1f s ago", std::chrono::duration<double>(age).count())});
  }
  return absl::StrCat("<h2>Other nodes</h2>\n", nodes.Text());
}

std::string RouteName(v1::Route route) {
  return absl::AsciiStrToLower(absl::StripPrefix(v1::Route_Name(route), "ROUTE_"));
}

}  // namespace

std::string StatusPage(const std::vector<Core::Seen>& places, SteadyTime started,
                       const std::vector<std::string>& events) {
  const NodeView& view = *OldestOf(places).view;
  const v1::GetStatusReply& status = view.status;
  const std::vector<SeenJob> jobs = JobsOf(places);
  const std::vector<std::string> troubles = Troubles(places);
  std::string body = absl::StrCat(
      "<h1>dmuond, node ", status.node(), " of ", status.nodes(), "</h1>\n<p class=\"dim\">",
      Html(status.version()), ", ", Html(status.device_type()), ", ", Html(status.group_state()),
      ", epoch ", status.epoch(), ", up ", Ago(started),
      " · <a href=\"routing\">routing</a> · <a href=\"metrics\">metrics</a></p>\n",
      Verdict(troubles, jobs.size()));
  for (const SeenJob& job : jobs) absl::StrAppend(&body, JobPart(job, view.snapshots));
  absl::StrAppend(&body, Nodes(view), "<h2>Last events</h2>\n<pre>");
  for (auto line = events.rbegin(); line != events.rend(); ++line) {
    absl::StrAppend(&body, Html(*line), "\n");
  }
  absl::StrAppend(&body, "</pre>\n");
  const std::string title = absl::StrCat(
      troubles.empty() ? "all right" : "look here",
      jobs.size() == 1 ? absl::StrCat(", step ", jobs[0].status.last_committed_step()) : "",
      jobs.size() > 1 ? absl::StrCat(", ", jobs.size(), " jobs") : "", ", node ", status.node());
  return HtmlPage(title, body, /*refreshes=*/true);
}

std::string RoutingPage(const std::vector<Core::Seen>& places) {
  std::string body = "<p><a href=\"statusz\">status</a></p>\n";
  for (const SeenJob& job : JobsOf(places)) {
    if (job.planned.plan == nullptr) continue;
    Rows rows({"parameter", "route", ">matrices", "owners", ">bucket", "why"});
    for (const v1::RoutingRow& row : RoutingRows(job.planned.inputs->layout, *job.planned.plan)) {
      const bool all = row.owners_size() > 8;
      rows.Add({row.parameter(), RouteName(row.route()),
                row.route() == v1::ROUTE_MUON ? absl::StrCat(row.matrices()) : "",
                all ? absl::StrCat(row.owners_size(), " lanes, from ", row.owners(0))
                    : absl::StrJoin(row.owners(), " "),
                row.bucket() < 0 ? "" : absl::StrCat(row.bucket()), row.why()});
    }
    absl::StrAppend(&body, "<h1>Routing of job ", Html(job.status.name()), "</h1>\n", rows.Text());
  }
  return HtmlPage("routing", body, /*refreshes=*/false);
}

}  // namespace dmuond::server
