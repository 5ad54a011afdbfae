// A team that was made while no thread could be had: prints how many threads run its first job and how many the next one.
#include "team.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <new>

bool is_short = false;

void* operator new(size_t size) {
  if (is_short) throw std::bad_alloc();  // a thread begins with a block of memory
  if (void* block = std::malloc(size)) return block;
  throw std::bad_alloc();
}
void operator delete(void* block) noexcept { std::free(block); }
void operator delete(void* block, size_t) noexcept { std::free(block); }

// How many threads come to a job that waits for `wanted` of them, at most some seconds.
static int threads_of(Team& team, int wanted, bool lacks_memory) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(lacks_memory ? 0 : 20);
  std::atomic<int> come{0};
  const std::function<void(int)> job = [&](int) {
    ++come;
    while (come < wanted && std::chrono::steady_clock::now() < deadline) sched_yield();
  };
  is_short = lacks_memory;
  team.run(0, job);
  is_short = false;
  return come;
}

int main() {
  is_short = true;
  static Team team(3);
  is_short = false;
  const int before = threads_of(team, 3, true), after = threads_of(team, 3, false);
  std::printf("%d %d of %d\n", before, after, team.size());
  std::fflush(stdout);
  std::_Exit(0);  // its threads never end
}
