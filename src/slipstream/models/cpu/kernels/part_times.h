// Where the time of a pass goes, for who asks.
#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

// mirrored by part_times.py
enum PassPart : int32_t {
  EMBEDDING,
  NORM,
  ROUNDING,  // of rows, to what the weights are multiplied with
  QKV,
  ROTATION,  // and storing keys and values
  ATTENTION,
  OUTPUT,
  GATE_UP,
  DOWN,
  EXPERTS,
  LAYER_INPUTS,
  HEAD,
  NUM_PASS_PARTS,
};

// What one thread has taken, in nanoseconds.
class PartTimes {
 public:
  explicit PartTimes(int num_layers) : nanoseconds(size_t(num_layers + 1) * NUM_PASS_PARTS * 2) {}

  void start() { last = std::chrono::steady_clock::now(); }

  // What has passed since the last call was a part of a layer (behind the last one: of none): work, or waiting for others.
  void add(int layer, PassPart part, bool waited) {
    const auto now = std::chrono::steady_clock::now();
    nanoseconds[(size_t(layer) * NUM_PASS_PARTS + part) * 2 + waited] +=
        std::chrono::duration_cast<std::chrono::nanoseconds>(now - last).count();
    last = now;
  }

  std::vector<int64_t> nanoseconds;  // [layers + 1, parts, 2]

 private:
  std::chrono::steady_clock::time_point last;
};
