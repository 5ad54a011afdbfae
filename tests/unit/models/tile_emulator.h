// AMX on a processor without it: each of its instructions traps, and is decoded and done here as Intel's manual says
// (Software Developer's Manual, volume 2: LDTILECFG, TILELOADD, TDPBUSD, TDPBF16PS, ...). For programs that are compiled with
// `-include tile_emulator.h`: what runs is the kernels' own machine code. An instruction that a processor would refuse
// ends the program.
#pragma once

#include <cpuid.h>
#include <signal.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <mutex>
#include <thread>

namespace emulated {

inline std::atomic<long> num_products{0};

struct Tiles {
  bool configured;
  int rows[8], bytes[8];
  uint8_t data[8][16][64];
};
inline thread_local Tiles tiles;

[[noreturn]] inline void refuse(const char* why) {
  std::printf("an instruction that AMX refuses: %s\n", why);
  std::fflush(stdout);
  std::_Exit(3);
}

inline void demand(bool holds, const char* otherwise) {
  if (!holds) refuse(otherwise);
}

inline void configure(const uint8_t* from) {
  demand(from[0] == 1, "a palette other than 1");
  tiles = {};
  tiles.configured = true;
  for (int i = 0; i < 64; ++i)
    if ((i > 0 && i < 16) || (i >= 32 && i < 48) || i >= 56) demand(from[i] == 0, "reserved bytes of the shapes");
  for (int tile = 0; tile < 8; ++tile) {
    uint16_t bytes;
    std::memcpy(&bytes, from + 16 + 2 * tile, 2);
    tiles.bytes[tile] = bytes;
    tiles.rows[tile] = from[48 + tile];
    demand(bytes <= 64 && from[48 + tile] <= 16 && (bytes == 0) == (from[48 + tile] == 0), "a tile's shape");
  }
}

inline int shaped(int tile) {
  demand(tile < 8 && tiles.configured && tiles.rows[tile], "a tile without a shape");
  return tile;
}

inline void move(int tile, uint8_t* memory, int64_t stride, bool load) {
  if (load) std::memset(tiles.data[tile], 0, sizeof tiles.data[tile]);
  for (int row = 0; row < tiles.rows[tile]; ++row) {
    uint8_t *at = memory + row * stride, *own = tiles.data[tile][row];
    std::memcpy(load ? own : at, load ? at : own, tiles.bytes[tile]);
  }
}

inline void demand_fit(int sums, int left, int right) {
  demand(sums != left && sums != right && left != right, "one tile twice");
  demand(tiles.rows[sums] == tiles.rows[left] && tiles.bytes[sums] == tiles.bytes[right] &&
             tiles.bytes[left] == 4 * tiles.rows[right] && tiles.bytes[sums] % 4 == 0,
         "products of tiles that do not fit");
}

// sums += the products of bytes, signed or not, in 32 bits.
inline void multiply(int sums, int left, int right, bool left_signed, bool right_signed) {
  demand_fit(sums, left, right);
  for (int m = 0; m < tiles.rows[sums]; ++m)
    for (int n = 0; n < tiles.bytes[sums] / 4; ++n) {
      uint32_t sum;
      std::memcpy(&sum, &tiles.data[sums][m][4 * n], 4);
      for (int k = 0; k < tiles.bytes[left]; ++k) {
        const uint8_t a = tiles.data[left][m][k], b = tiles.data[right][k / 4][4 * n + k % 4];
        sum += uint32_t((left_signed ? int8_t(a) : int(a)) * (right_signed ? int8_t(b) : int(b)));
      }
      std::memcpy(&tiles.data[sums][m][4 * n], &sum, 4);
    }
  ++num_products;
}

inline float or_zero(float value) { return std::fabs(value) < 0x1p-126f ? std::copysign(0.0f, value) : value; }

inline float number(const uint8_t* bfloat16) {
  uint8_t bytes[4] = {0, 0, bfloat16[0], bfloat16[1]};
  float value;
  std::memcpy(&value, bytes, 4);
  return or_zero(value);
}

// sums += the products of bfloat16 numbers: two chains from zero, of even and of odd inputs, then their sum.
inline void multiply_bfloat16(int sums, int left, int right) {
  demand_fit(sums, left, right);
  for (int m = 0; m < tiles.rows[sums]; ++m)
    for (int n = 0; n < tiles.bytes[sums] / 4; ++n) {
      float chains[2] = {0.0f, 0.0f}, sum;
      for (int k = 0; k < tiles.bytes[left] / 2; ++k) {
        const float a = number(&tiles.data[left][m][2 * k]), b = number(&tiles.data[right][k / 2][4 * n + k % 2 * 2]);
        chains[k % 2] = or_zero(std::fma(a, b, chains[k % 2]));
      }
      std::memcpy(&sum, &tiles.data[sums][m][4 * n], 4);
      sum = or_zero(or_zero(sum) + or_zero(chains[0] + chains[1]));
      std::memcpy(&tiles.data[sums][m][4 * n], &sum, 4);
    }
  ++num_products;
}

// The registers by their numbers in instructions.
constexpr int REGISTERS[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                             REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};

// A processor with AMX whose system has not been asked traps at the tiles' data alone: shapes are loaded and released
// by the processor itself, and the interrupted thread's are in what the system saved of it.
inline void take_shapes_of_the_processor(const mcontext_t& saved) {
  constexpr int SHAPES = 17;  // the number of this part of the saved state
  static thread_local uint8_t last[64];
  unsigned size = 0, offset = 0, unused = 0;
  __get_cpuid_count(0xD, SHAPES, &size, &offset, &unused, &unused);
  const auto* state = reinterpret_cast<const uint8_t*>(saved.fpregs);
  if (size < sizeof last || !(state[512 + SHAPES / 8] >> SHAPES % 8 & 1)) return;
  if (tiles.configured && !std::memcmp(last, state + offset, sizeof last)) return;
  std::memcpy(last, state + offset, sizeof last);
  configure(last);
}

inline void trapped(int, siginfo_t*, void* context) {
  const mcontext_t& saved = static_cast<ucontext_t*>(context)->uc_mcontext;
  greg_t* registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  take_shapes_of_the_processor(saved);
  const auto* code = reinterpret_cast<const uint8_t*>(registers[REG_RIP]);
  // VEX: C4, then ~R ~X ~B map, then W ~vvvv L pp; the opcode; ModRM.
  demand(code[0] == 0xC4 && (code[1] & 31) == 2 && (code[2] & 0x84) == 0, "none that is known here");
  const int opcode = code[3], prefix = code[2] & 3, mod = code[4] >> 6, reg = code[4] >> 3 & 7, rm = code[4] & 7;
  const int third = ~code[2] >> 3 & 15, high_index = code[1] & 64 ? 0 : 8, high_base = code[1] & 32 ? 0 : 8;
  enum { NONE, P66, PF3, PF2 };
  int length = 5;
  uint8_t* memory = nullptr;
  int64_t stride = 0;
  if (mod != 3) {
    int base = rm;
    if (rm == 4) {
      const int sib = code[length++], index = (sib >> 3 & 7) + high_index;
      base = sib & 7;
      if (index != 4) stride = registers[REGISTERS[index]] << (sib >> 6);
    }
    demand(mod != 0 || base != 5, "an address without a base");
    int32_t offset = mod == 1 ? int8_t(code[length]) : 0;
    if (mod == 2) std::memcpy(&offset, code + length, 4);
    length += mod == 1 ? 1 : mod == 2 ? 4 : 0;
    memory = reinterpret_cast<uint8_t*>(registers[REGISTERS[base + high_base]] + offset);
  }
  if (opcode == 0x49 && memory && prefix == NONE && reg == 0) configure(memory);
  else if (opcode == 0x49 && code[4] == 0xC0 && prefix == NONE) tiles = {};
  else if (opcode == 0x49 && !memory && rm == 0 && prefix == PF2) std::memset(tiles.data[shaped(reg)], 0, 1024);
  else if (opcode == 0x4B && memory && rm == 4 && prefix == PF2) move(shaped(reg), memory, stride, true);
  else if (opcode == 0x4B && memory && rm == 4 && prefix == PF3) move(shaped(reg), memory, stride, false);
  else if (opcode == 0x5E && !memory)
    multiply(shaped(reg), shaped(rm), shaped(third), prefix == PF2 || prefix == PF3, prefix == PF2 || prefix == P66);
  else if (opcode == 0x5C && !memory && prefix == PF3) multiply_bfloat16(shaped(reg), shaped(rm), shaped(third));
  else refuse("none that is known here");
  registers[REG_RIP] += length;
}

// In the place of the kernels' only system call; SLIPSTREAM_TEST_TILES=refused refuses.
inline long answer(long number, int operation, int feature) {
  const char* wanted = std::getenv("SLIPSTREAM_TEST_TILES");
  demand(number == SYS_arch_prctl && operation == 0x1023 && feature == 18, "another question");
  return wanted && !std::strcmp(wanted, "refused") ? -1 : 0;
}

struct Installed {
  Installed() {
    struct sigaction action {};
    action.sa_sigaction = trapped;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigaction(SIGILL, &action, nullptr);
  }
};
inline Installed installed;

}  // namespace emulated

#define syscall emulated::answer
