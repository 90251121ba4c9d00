#include "scheduler/model_layout.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace dmuond::scheduler {
namespace {

// The i-th tensor of a row of the model's table, of which each layer has `per_layer`.
Parameter ParameterOf(const ShapeCount& shape, Route route, int64_t i, int64_t per_layer) {
  Parameter parameter;
  parameter.name = absl::StrCat(shape.name, ".", i);
  parameter.shape = shape.rows == 1 ? Extents{shape.cols} : Extents{shape.rows, shape.cols};
  parameter.weight_type = ElementType::kBF16;
  parameter.gradient_type = ElementType::kBF16;
  parameter.route = route;
  parameter.route_reason = "model table";
  parameter.ready_order = static_cast<int32_t>(-(i / per_layer));
  return parameter;
}

int64_t PerLayer(const ShapeCount& shape, int32_t layers) {
  return layers > 0 ? std::max<int64_t>(1, shape.count / layers) : 1;
}

class LayoutBuilder {
 public:
  LayoutBuilder(int32_t layers, int32_t nodes, int32_t lanes_per_node) : layers_(layers) {
    for (int32_t rank = 0; rank < nodes * lanes_per_node; ++rank) {
      layout_.trainers.push_back(
          {TrainerRank(rank), NodeRank(rank / lanes_per_node), LaneIndex(rank % lanes_per_node)});
    }
    ends_bytes_.assign(layout_.trainers.size(), 0);
  }

  void Add(const ShapeCount& shape, Route route) {
    for (int64_t i = 0; i < shape.count; ++i) {
      Parameter parameter = ParameterOf(shape, route, i, PerLayer(shape, layers_));
      const bool expert = absl::StartsWith(shape.name, "experts.");
      const int32_t stride =
          expert ? std::min<int32_t>(kExpertRanks, static_cast<int32_t>(ends_bytes_.size())) : 1;
      Hold(parameter, static_cast<int32_t>(i % stride), stride);
      layout_.parameters.push_back(std::move(parameter));
    }
  }

  [[nodiscard]] Layout Finish() { return std::move(layout_); }

 private:
  // Ranks first, first + stride, … hold the whole of it.
  void Hold(const Parameter& parameter, int32_t first, int32_t stride) {
    const Box whole = WholeBox(parameter.shape);
    for (auto rank = first; rank < static_cast<int32_t>(ends_bytes_.size()); rank += stride) {
      const Extents strides = RowMajorStrides(parameter.shape);
      Places places{{0, ends_bytes_[rank], strides}, {1, ends_bytes_[rank], strides}};
      if (layout_.places.empty() || layout_.places.back() != places) {
        layout_.places.push_back(std::move(places));
      }
      LayoutFragment& fragment = layout_.fragments.emplace_back();
      fragment.rank = TrainerRank(rank);
      fragment.parameter = static_cast<int32_t>(layout_.parameters.size());
      fragment.box = whole;
      fragment.places = static_cast<int32_t>(layout_.places.size()) - 1;
      ends_bytes_[rank] += Elements(whole) * SizeOf(parameter.weight_type);
    }
  }

  int32_t layers_;
  Layout layout_;
  std::vector<int64_t> ends_bytes_;
};

}  // namespace

Layout LayoutOf(const ModelShapes& model, int32_t nodes, int32_t lanes_per_node) {
  LayoutBuilder builder(model.layers, nodes, lanes_per_node);
  for (const ShapeCount& shape : model.muon) builder.Add(shape, Route::kMuon);
  for (const ShapeCount& shape : model.adamw) builder.Add(shape, Route::kAdamW);
  return builder.Finish();
}

Registration ShardedRegistration(const ModelShapes& model, int32_t rank, int32_t world_size,
                                 int32_t lanes_per_node) {
  Registration registration;
  registration.rank = TrainerRank(rank);
  registration.node = NodeRank(rank / lanes_per_node);
  registration.home = LaneIndex(rank % lanes_per_node);
  int64_t end_bytes = 0;
  const auto add = [&](const ShapeCount& shape, Route route) {
    for (int64_t i = 0; i < shape.count; ++i) {
      Parameter parameter = ParameterOf(shape, route, i, PerLayer(shape, model.layers));
      const int64_t rows = parameter.shape[0];
      const int64_t chunk = (rows + world_size - 1) / world_size;
      Fragment fragment;
      fragment.rank = registration.rank;
      fragment.parameter = static_cast<int32_t>(registration.parameters.size());
      fragment.box = WholeBox(parameter.shape);
      fragment.box.begin[0] = std::min(rows, rank * chunk);
      fragment.box.end[0] = std::min(rows, (rank + 1) * chunk);
      const Extents strides = RowMajorStrides(ShapeOf(fragment.box));
      fragment.gradient = {0, end_bytes, strides};
      fragment.weight = {1, end_bytes, strides};
      end_bytes += Elements(fragment.box) * SizeOf(parameter.weight_type);
      registration.parameters.push_back(std::move(parameter));
      registration.fragments.push_back(std::move(fragment));
    }
  };
  for (const ShapeCount& shape : model.muon) add(shape, Route::kMuon);
  for (const ShapeCount& shape : model.adamw) add(shape, Route::kAdamW);
  return registration;
}

}  // namespace dmuond::scheduler
