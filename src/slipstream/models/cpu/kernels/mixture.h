// Which rows of a pass go to which experts of a mixture.
//
// Every row is sent to the experts with its largest numbers of the router. Rows are grouped by expert, so that an expert's
// weights are read once for all rows that chose it. What a row chooses, its shares and their order depend on that row alone.
#pragma once

#include <algorithm>
#include <vector>

#include "attention.h"
#include "model.h"

// The `count` largest of `size` numbers, of equal ones the first, in ascending order of their places. Where all are NaN they
// are the first.
inline void choose_experts(const float* numbers, int size, int count, int32_t* chosen) {
  int found = 0;
  for (int i = 0; i < size; ++i) {
    if (found == count && !(numbers[i] > numbers[chosen[count - 1]])) continue;
    int place = found < count ? found++ : count - 1;
    for (; place > 0 && numbers[i] > numbers[chosen[place - 1]]; --place) chosen[place] = chosen[place - 1];
    chosen[place] = i;
  }
  std::sort(chosen, chosen + count);
}

// The softmax of the chosen among all numbers, or among the chosen ones alone: then the shares add up to 1.
inline void share_out(const float* numbers, int size, const int32_t* chosen, int count, bool whole, float* shares) {
  float largest = numbers[chosen[0]], sum = 0.0f;
  for (int i = 1; i < count; ++i) largest = std::max(largest, numbers[chosen[i]]);
  for (int i = 0; i < count; ++i) shares[i] = exp_of_negative(numbers[chosen[i]] - largest);
  if (whole) {
    for (int i = 0; i < count; ++i) sum += shares[i];
  } else {
    for (int i = 0; i < size; ++i) sum += exp_of_negative(numbers[i] - largest);
  }
  for (int i = 0; i < count; ++i) shares[i] /= sum;
}

// Room for it. A visit is a row at one of its experts; visits are numbered expert by expert, of one expert row by row.
struct Routing {
  std::vector<float> numbers;              // [rows, experts], of the router
  std::vector<float> shares;               // [rows, chosen], ascending experts
  std::vector<int32_t> chosen, visits;     // [rows, chosen]: the experts, and the numbers of the visits
  std::vector<int32_t> row_of;             // [visits]
  std::vector<int32_t> first;              // [experts + 1]: the first visit of each
  std::vector<int32_t> visited;            // the experts that have any, the first num_visited
  int num_visited = 0;

  void reserve(const Model& m, size_t rows) {
    const size_t visits_of_all = rows * m.num_chosen;
    make_room(numbers, rows * m.num_experts);
    make_room(shares, visits_of_all);
    for (auto* each : {&chosen, &visits, &row_of}) make_room(*each, visits_of_all);
    make_room(first, m.num_experts ? m.num_experts + 1 : 0);
    make_room(visited, m.num_experts);
  }

  size_t num_bytes() const {
    size_t total = bytes_of(numbers) + bytes_of(shares);
    for (auto* each : {&chosen, &visits, &row_of, &first, &visited}) total += bytes_of(*each);
    return total;
  }

  // `scales`: of the shares, or null.
  void choose(const Model& m, const float* scales, int row) {
    const float* of_row = &numbers[size_t(row) * m.num_experts];
    const size_t place = size_t(row) * m.num_chosen;
    choose_experts(of_row, m.num_experts, m.num_chosen, &chosen[place]);
    share_out(of_row, m.num_experts, &chosen[place], m.num_chosen, m.whole_shares, &shares[place]);
    if (scales)
      for (size_t i = place; i < place + m.num_chosen; ++i) shares[i] *= scales[chosen[i]];
  }

  // Number the visits of all rows.
  void group(const Model& m, int rows) {
    const int all = rows * m.num_chosen;
    std::fill_n(first.begin(), m.num_experts + 1, 0);
    for (int i = 0; i < all; ++i) ++first[chosen[i] + 1];
    num_visited = 0;
    for (int expert = 0; expert < m.num_experts; ++expert) {
      if (first[expert + 1]) visited[num_visited++] = expert;
      first[expert + 1] += first[expert];
    }
    for (int i = 0; i < all; ++i) {  // `first` runs to the end of each expert's visits, which is the next one's first
      visits[i] = first[chosen[i]]++;
      row_of[visits[i]] = i / m.num_chosen;
    }
    for (int expert = m.num_experts; expert > 0; --expert) first[expert] = first[expert - 1];
    first[0] = 0;
  }
};
