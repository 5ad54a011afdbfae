// AMX: tiles are registers of up to 16 rows of 64 bytes, and one instruction multiplies two of them.
//
// Each instruction is said in assembler: GCC's intrinsics for them do not say that they read and write memory.
#pragma once

#if defined(__AMX_INT8__) && defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>

#define SLIPSTREAM_TILES 1
constexpr bool HAS_TILES = true;
#else
constexpr bool HAS_TILES = false;
#endif

constexpr int TILE_ROWS = 16;
constexpr int TILE_BYTES = 64;  // of a row

#if defined(SLIPSTREAM_TILES)

// Whether the system lets this process use tiles: Linux wants to be asked, as it saves 8 KB more of every thread that
// does. It answers for all threads, and for children.
inline bool tiles_permitted() {
  constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18;
  static const bool permitted = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0;
  return permitted;
}

// What ldtilecfg reads.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, unused[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int num_rows, int num_bytes = TILE_BYTES) {
    rows[tile] = uint8_t(num_rows);
    row_bytes[tile] = uint16_t(num_bytes);
  }
};
static_assert(sizeof(TileShapes) == 64);

// The shapes of this thread's tiles, until they are released.
inline void shape_tiles(const TileShapes& shapes) { asm volatile("ldtilecfg (%0)" : : "r"(&shapes) : "memory"); }

// A thread that holds tiles costs the system more whenever it is put aside.
inline void release_tiles() { asm volatile("tilerelease" : : : "memory"); }

template <int tile>
inline void clear_tile() {
  asm volatile("tilezero %%tmm%c0" : : "i"(tile) : "memory");
}

// Rows of the tile lie `stride` bytes apart.
template <int tile>
inline void load_tile(const void* from, size_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(tile) : "memory");
}

template <int tile>
inline void store_tile(void* to, size_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(tile) : "memory");
}

// sums [rows, 16] += rows [rows, 64] of signed bytes times weights [64 / 4, 16, 4] of unsigned ones: 32-bit integers, exact.
struct SignedByteProducts {
  typedef int32_t Sum;

  template <int sums, int rows, int weights>
  static void add() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sums), "i"(rows), "i"(weights) : "memory");
  }
};

// As SignedByteProducts, of signed weights.
struct SignedProducts {
  typedef int32_t Sum;

  template <int sums, int rows, int weights>
  static void add() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sums), "i"(rows), "i"(weights) : "memory");
  }
};

// sums [rows, 16] += rows [rows, 32] times weights [32 / 2, 16, 2], bfloat16 numbers whose products are added in float32, in
// the order that bfloat16.h says.
struct Bfloat16Products {
  typedef float Sum;

  template <int sums, int rows, int weights>
  static void add() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sums), "i"(rows), "i"(weights) : "memory");
  }
};

#endif
