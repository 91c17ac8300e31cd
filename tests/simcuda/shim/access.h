// Part of runtime.cpp: the hooks that g++ -fsanitize=thread calls before every access, and what they keep.
//
// Two things are kept for a window. Marks: a bit a byte, exact whatever the order of the threads is, from which the simulator
// reads the ranges of the launch. Cells: who touched a byte last, from which races between threads of one launch are seen.
//
// A cell is `serial of the block:22 | thread:11 | barriers of the block:16 | barriers of the warp:14 | atomic:1`. Serials grow
// over all launches, so cells of earlier launches need no clearing: their serial is below the launch's first.
#pragma once

namespace simcuda {

constexpr u32 several_threads = threads_max;
constexpr u32 several_blocks = threads_max + 1;
constexpr u32 windows_max = 64;
constexpr u32 block_epoch_max = 0xffff;
constexpr u32 warp_epoch_max = 0x3fff;

static Launch* launch;
static bool intra;
static u64 intra_accesses_left;
// Never matches: there is nothing at address 1.
static Window no_window = {1, 0, nullptr, nullptr, nullptr};
static Window windows[windows_max];
static u32 windows_used, windows_replaced;
static Window* window_of_site[256];

// The thread that runs.
static u32 thread_now;
static u64 block_now;      // in the order of the grid
static u32 serial_now;
static u32 block_epoch;
static u32 warp_epoch[threads_max];
static u8 *stack_low, *stack_high;

[[noreturn]] static void leave(const Failure& failure);

extern "C" {
extern u8 library_begin[] __asm__("__ehdr_start") __attribute__((visibility("hidden")));
extern u8 library_end[] __asm__("_end") __attribute__((visibility("hidden")));
}

static Failure failure_here(FailureKind kind, void* site) {
    Failure failure = {};
    failure.kind = kind;
    failure.thread = thread_now;
    failure.block = block_now;
    failure.site = site ? static_cast<u64>(static_cast<u8*>(site) - library_begin) : 0;
    return failure;
}

// ---- releases between blocks: __threadfence, then an atomic, which a later block's atomic on the same address sees ----

struct Channel {
    u64 address;
    u64* blocks;  // a bit a block of this launch, by its place in the order of execution
};
constexpr u32 channels_max = 16;
static Channel channels[channels_max];
static u32 channels_used;
static u64* acquired;         // the blocks before which the present one comes, or null: none
static u64 channel_words;
static bool fenced;           // by a thread of this block
static bool acquired_all;

static u64 place_of(u32 serial) { return serial - launch->first_serial; }

static bool is_acquired(u32 serial) {
    u64 place = place_of(serial);
    return acquired && (acquired[place >> 6] >> (place & 63) & 1);
}

static void see_acquired_all() {
    u64 before = place_of(serial_now);
    acquired_all = true;
    for (u64 place = 0; place < before && acquired_all; place++) acquired_all = acquired[place >> 6] >> (place & 63) & 1;
}

// An atomic is how blocks learn of each other. Whoever fenced before it has published all that its block did until then.
static void exchange_order(u64 address) {
    Channel* channel = nullptr;
    for (u32 i = 0; i < channels_used; i++)
        if (channels[i].address == address) channel = &channels[i];
    if (!channel) {
        if (!fenced) return;
        // With more addresses than channels the last one stands for all of the rest: orders too much, and never reports wrongly.
        if (channels_used < channels_max) {
            channel = &channels[channels_used++];
            channel->address = address;
            channel->blocks = static_cast<u64*>(calloc(channel_words, sizeof(u64)));
        } else {
            channel = &channels[channels_max - 1];
        }
    }
    if (!acquired) acquired = static_cast<u64*>(calloc(channel_words, sizeof(u64)));
    if (!channel->blocks || !acquired) return;
    for (u64 word = 0; word < channel_words; word++) acquired[word] |= channel->blocks[word];
    see_acquired_all();
    if (!fenced) return;
    u64 place = place_of(serial_now);
    acquired[place >> 6] |= 1ull << (place & 63);
    for (u64 word = 0; word < channel_words; word++) channel->blocks[word] |= acquired[word];
}

static void forget_channels() {
    for (u32 i = 0; i < channels_used; i++) free(channels[i].blocks);
    channels_used = 0;
    free(acquired);
    acquired = nullptr;
}

static void begin_block_order() {
    fenced = acquired_all = false;
    free(acquired);
    acquired = nullptr;
}

// ---- cells ----

static u32 serial_of(u64 cell) { return static_cast<u32>(cell >> 42); }
static u32 thread_of(u64 cell) { return static_cast<u32>(cell >> 31) & 0x7ff; }
static u32 block_epoch_of(u64 cell) { return static_cast<u32>(cell >> 15) & 0xffff; }
static u32 warp_epoch_of(u64 cell) { return static_cast<u32>(cell >> 1) & 0x3fff; }
static bool is_atomic(u64 cell) { return cell & 1; }

static u64 cell_of(u32 thread, bool atomic) {
    // Several threads are in no warp: no barrier of a warp orders them.
    u32 warp = thread < threads_max ? warp_epoch[thread] : warp_epoch_max;
    return static_cast<u64>(serial_now) << 42 | static_cast<u64>(thread) << 31 | static_cast<u64>(block_epoch) << 15 |
           static_cast<u64>(warp) << 1 | (atomic ? 1 : 0);
}

// Whether what the cell says happened before what the running thread does now.
static bool is_ordered(u64 cell, bool is_shared) {
    u32 serial = serial_of(cell);
    // Shared memory is another one for every block.
    if (serial < launch->first_serial || (is_shared && serial != serial_now)) return true;
    u32 thread = thread_of(cell);
    if (thread == several_blocks) return acquired_all;
    if (serial != serial_now) return is_acquired(serial);
    if (thread == thread_now || block_epoch_of(cell) != block_epoch) return true;
    return thread / warp_lanes == thread_now / warp_lanes && warp_epoch_of(cell) < warp_epoch[thread_now];
}

// What a cell becomes when the running thread joins others there that are not ordered with it.
static u64 joined(u64 cell, u64 mine, bool atomic, bool is_shared) {
    if (is_ordered(cell, is_shared)) return mine;
    return cell_of(serial_of(cell) == serial_now && thread_of(cell) != several_blocks ? several_threads : several_blocks, atomic);
}

// Two threads wrote one byte. Equal values do no harm (flags that many threads raise), and the second value is known only
// once it is written: then this is looked at again.
static struct Pending {
    bool is_open;
    u8* pointer;
    u32 size_bytes;
    u8 before[16];
    Failure failure;
} pending;

static void settle_pending() {
    pending.is_open = false;
    if (memcmp(pending.before, pending.pointer, pending.size_bytes)) leave(pending.failure);
}

[[gnu::noinline]] static void conflict(u64 address, u64 size_bytes, u64 at, Kind kind, u64 cell, Kind other, void* site) {
    Failure failure = failure_here(RACE, site);
    failure.access = kind;
    failure.address = at;
    failure.size_bytes = size_bytes;
    failure.other_thread = thread_of(cell);
    failure.other_access = other;
    failure.other_block = place_of(serial_of(cell));
    if (kind == WRITE && other == WRITE && size_bytes <= sizeof pending.before) {
        if (pending.is_open) return;
        pending.is_open = true;
        pending.pointer = reinterpret_cast<u8*>(address);
        pending.size_bytes = static_cast<u32>(size_bytes);
        memcpy(pending.before, pending.pointer, size_bytes);
        pending.failure = failure;
        return;
    }
    leave(failure);
}

static void follow(Window* window, u64 offset, u64 size_bytes, Kind kind, void* site) {
    if (pending.is_open) settle_pending();
    if (intra_accesses_left == 0) {
        intra = false;
        return;
    }
    intra_accesses_left--;
    u64* cell = window->cells + 2 * offset;
    u64 mine = cell_of(thread_now, kind == ATOMIC);
    u64 address = window->low + offset;
    bool is_shared = !window->marks;
    // The bytes of one access mostly have one history: what was found of a cell holds for the next that is equal.
    u64 write_seen = mine, read_seen = mine, read_joined = mine;
    for (u64 i = 0; i < size_bytes; i++, cell += 2) {
        u64 written = cell[0], read = cell[1];
        if (written != write_seen) {
            if (!(kind == ATOMIC && is_atomic(written)) && !is_ordered(written, is_shared))
                conflict(address, size_bytes, address + i, kind, written, is_atomic(written) ? ATOMIC : WRITE, site);
            write_seen = written;
        }
        if (kind == READ) {
            if (read != read_seen) {
                read_joined = joined(read, mine, false, is_shared);
                read_seen = read;
            }
            if (read != read_joined) cell[1] = read_joined;
            continue;
        }
        if (read != read_seen) {
            if (!is_ordered(read, is_shared)) conflict(address, size_bytes, address + i, kind, read, READ, site);
            read_seen = read;
        }
        cell[0] = kind == ATOMIC ? joined(written, mine, true, is_shared) : mine;
    }
}

// ---- windows ----

static Window* add_window(const Window& window) {
    u32 slot = windows_used < windows_max ? windows_used++ : windows_replaced++ % windows_max;
    windows[slot] = window;
    return &windows[slot];
}

// The window that holds all of an access; null: the thread's own stack or the library's data, which are nobody's business.
// Leaves the kernel if there is none.
[[gnu::noinline]] static Window* find_window(u64 address, u64 size_bytes, Kind kind, void* site) {
    u8* pointer = reinterpret_cast<u8*>(address);
    if (pointer >= stack_low && pointer + size_bytes <= stack_high) return nullptr;
    Window* found = nullptr;
    for (u32 i = 0; i < windows_used && !found; i++)
        if (address - windows[i].low < windows[i].length_bytes) found = &windows[i];
    if (!found) {
        if (pointer >= library_begin && pointer + size_bytes <= library_end &&
            !(pointer >= simcuda_dynamic_shared && pointer < simcuda_dynamic_shared + dynamic_shared_bytes_max))
            return nullptr;
        Window window;
        if (launch->find(launch->context, address, &window)) found = add_window(window);
    }
    if (!found || address - found->low + size_bytes > found->length_bytes) {
        Failure failure = failure_here(ADDRESS, site);
        failure.access = kind;
        failure.address = address;
        failure.size_bytes = size_bytes;
        leave(failure);
    }
    window_of_site[reinterpret_cast<u64>(site) >> 2 & 255] = found;
    return found;
}

[[gnu::noinline]] static void misaligned(u64 address, u64 size_bytes, Kind kind, void* site) {
    u8* pointer = reinterpret_cast<u8*>(address);
    // The compiler may take unaligned vectors of its own stack.
    if (pointer >= stack_low && pointer + size_bytes <= stack_high) return;
    Failure failure = failure_here(MISALIGNED, site);
    failure.access = kind;
    failure.address = address;
    failure.size_bytes = size_bytes;
    leave(failure);
}

static inline Window* window_at(u64 address, u64 size_bytes, Kind kind, void* site) {
    Window* window = window_of_site[reinterpret_cast<u64>(site) >> 2 & 255];
    u64 offset = address - window->low;
    if (__builtin_expect(offset < window->length_bytes && offset + size_bytes <= window->length_bytes, 1)) return window;
    return find_window(address, size_bytes, kind, site);
}

static void mark_bytes(Window* window, u64 offset, u64 size_bytes, Kind kind) {
    while (size_bytes) {
        u64 bit = offset & 63;
        u64 count = size_bytes < 64 - bit ? size_bytes : 64 - bit;
        window->marks[(offset >> 6) * 4 + kind] |= (count == 64 ? ~0ull : (1ull << count) - 1) << bit;
        window->pages[offset >> 12] = 1;
        offset += count;
        size_bytes -= count;
    }
}

static void access_range(u64 address, u64 size_bytes, Kind kind, void* site) {
    if (!size_bytes) return;
    Window* window = window_at(address, size_bytes, kind, site);
    if (!window) return;
    u64 offset = address - window->low;
    if (window->marks) mark_bytes(window, offset, size_bytes, kind);
    if (intra && window->cells) follow(window, offset, size_bytes, kind, site);
}

// An access of a power of two, which CUDA wants aligned: all of its marks are in one word.
template <u32 size_bytes, Kind kind>
static inline void access(void* pointer, void* site) {
    u64 address = reinterpret_cast<u64>(pointer);
    if (__builtin_expect(address & (size_bytes - 1), 0)) {
        misaligned(address, size_bytes, kind, site);
        return;
    }
    Window* window = window_at(address, size_bytes, kind, site);
    if (!window) return;
    u64 offset = address - window->low;
    if (window->marks) {
        window->marks[(offset >> 6) * 4 + kind] |= ((1ull << size_bytes) - 1) << (offset & 63);
        window->pages[offset >> 12] = 1;
    }
    if (__builtin_expect(intra, 0) && window->cells) follow(window, offset, size_bytes, kind, site);
}

}  // namespace simcuda

#define SIMCUDA_HOOK(SIZE)                                                                                              \
    void __tsan_read##SIZE(void* pointer) { simcuda::access<SIZE, simcuda::READ>(pointer, __builtin_return_address(0)); } \
    void __tsan_write##SIZE(void* pointer) { simcuda::access<SIZE, simcuda::WRITE>(pointer, __builtin_return_address(0)); }

#pragma GCC visibility push(hidden)
extern "C" {
SIMCUDA_HOOK(1)
SIMCUDA_HOOK(2)
SIMCUDA_HOOK(4)
SIMCUDA_HOOK(8)
SIMCUDA_HOOK(16)

void __tsan_init() {}
void __tsan_read_range(void* pointer, unsigned long size_bytes) {
    simcuda::access_range(reinterpret_cast<simcuda::u64>(pointer), size_bytes, simcuda::READ, __builtin_return_address(0));
}
void __tsan_write_range(void* pointer, unsigned long size_bytes) {
    simcuda::access_range(reinterpret_cast<simcuda::u64>(pointer), size_bytes, simcuda::WRITE, __builtin_return_address(0));
}

void* simcuda_memcpy(void* to, const void* from, unsigned long size_bytes) {
    void* site = __builtin_return_address(0);
    simcuda::access_range(reinterpret_cast<simcuda::u64>(from), size_bytes, simcuda::READ, site);
    simcuda::access_range(reinterpret_cast<simcuda::u64>(to), size_bytes, simcuda::WRITE, site);
    return memcpy(to, from, size_bytes);
}

void* simcuda_memset(void* to, int value, unsigned long size_bytes) {
    simcuda::access_range(reinterpret_cast<simcuda::u64>(to), size_bytes, simcuda::WRITE, __builtin_return_address(0));
    return memset(to, value, size_bytes);
}

void simcuda_atomic(void* pointer, unsigned long size_bytes) {
    simcuda::u64 address = reinterpret_cast<simcuda::u64>(pointer);
    void* site = __builtin_return_address(0);
    if (address & (size_bytes - 1)) simcuda::misaligned(address, size_bytes, simcuda::ATOMIC, site);
    simcuda::access_range(address, size_bytes, simcuda::ATOMIC, site);
    if (simcuda::intra) simcuda::exchange_order(address);
}

void simcuda_fence() { simcuda::fenced = true; }
}
#pragma GCC visibility pop
