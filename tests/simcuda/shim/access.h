// Part of runtime.cpp: the hooks that g++ -fsanitize=thread calls before every access, and what they keep.
//
// Two things are kept for a window. Marks: a bit a byte, exact whatever the order of the threads is, from which the simulator
// reads the ranges of the launch. Cells: who touched a byte last, from which races between threads of one launch are seen.
//
// A cell is `serial of the block:22 | thread:11 | barriers of the block:16 | barriers of the warp:11 | fences of the thread:3 |
// atomic:1`. Serials grow over all launches, so cells of earlier launches need no clearing: their serial is below the launch's
// first. Beside the cells, for every 4 bytes: `serial:22 | thread:11 | site:31`, so that a message can name both lines.
#pragma once

namespace simcuda {

constexpr u32 several_threads = threads_max;
constexpr u32 several_blocks = threads_max + 1;
constexpr u32 windows_max = 64;
constexpr u32 block_epoch_max = 0xffff;
constexpr u32 warp_epoch_max = 0x7ff;
// So many fences between two barriers are told apart; what comes after more counts as published by the last.
constexpr u32 fence_epoch_max = 7;

static Launch* launch;
static bool intra;
static u64 intra_accesses_left;
// Never matches: there is nothing at address 1.
static Window no_window = {1, 0, nullptr, nullptr, nullptr, nullptr};
static Window windows[windows_max];
static u32 windows_used, windows_replaced;
static Window* window_of_site[256];

// The thread that runs.
static u32 thread_now;
static u64 block_now;      // in the order of the grid
static u32 serial_now;
static u32 block_epoch;
static u32 warp_epoch[threads_max];
static u8 fence_epoch[threads_max];
static u8 *stack_low, *stack_high;

[[noreturn]] static void leave(const Failure& failure);

// Copies that threads of the block have started and not waited for (copies.h).
static u64 copies_in_flight;
static void check_copies(u64 address, u64 size_bytes, Kind kind, void* site);

struct Index {
    u32 x, y, z;
};

extern "C" {
extern Index threadIdx __attribute__((visibility("hidden"))), blockIdx __attribute__((visibility("hidden")));
extern Index blockDim __attribute__((visibility("hidden"))), gridDim __attribute__((visibility("hidden")));
extern u8 library_begin[] __asm__("__ehdr_start") __attribute__((visibility("hidden")));
}

static u64 site_of(void* site) { return site ? static_cast<u64>(static_cast<u8*>(site) - library_begin) : 0; }

static Failure failure_here(FailureKind kind, void* site) {
    Failure failure = {};
    failure.kind = kind;
    failure.thread = thread_now;
    failure.block = block_now;
    failure.site = site_of(site);
    return failure;
}

// ---- cells ----

static u32 serial_of(u64 cell) { return static_cast<u32>(cell >> 42); }
static u32 thread_of(u64 cell) { return static_cast<u32>(cell >> 31) & 0x7ff; }
static u32 block_epoch_of(u64 cell) { return static_cast<u32>(cell >> 15) & 0xffff; }
static u32 warp_epoch_of(u64 cell) { return static_cast<u32>(cell >> 4) & 0x7ff; }
static u32 fence_epoch_of(u64 cell) { return static_cast<u32>(cell >> 1) & 7; }
static bool is_atomic(u64 cell) { return cell & 1; }
static u64 place_of(u32 serial) { return serial - launch->first_serial; }

static u64 cell_of(u32 thread, bool atomic) {
    // Several threads are in no warp: no barrier of a warp orders them, and no fence of one publishes for all.
    u32 warp = thread < threads_max ? warp_epoch[thread] : warp_epoch_max;
    u32 fences = thread < threads_max ? fence_epoch[thread] : fence_epoch_max;
    return static_cast<u64>(serial_now) << 42 | static_cast<u64>(thread) << 31 | static_cast<u64>(block_epoch) << 15 |
           static_cast<u64>(warp) << 4 | static_cast<u64>(fences) << 1 | (atomic ? 1 : 0);
}

static bool is_one_warp(u64 a, u64 b) { return thread_of(a) / warp_lanes == thread_of(b) / warp_lanes; }

// ---- releases between blocks ----
//
// A fence publishes what its thread did, and what other threads did before a barrier, once an atomic follows: one of that thread,
// or one of another thread after a barrier. A later block learns of it by an atomic on the same address. What a thread writes
// after its fence is not published by it.

// Beyond these numbers everything counts as published: then there are races that are not found, but no false ones.
constexpr u32 fences_max = 1 << 14;
constexpr u32 channels_max = 1 << 12;

struct Channel {
    u64 address;
    u64* fences;  // that its atomics published: a bit each
};
static Channel channels[channels_max];
static u32 channels_used;
static u64* fences;           // of all blocks, in the order of execution: each as the cell of an access there
static u32 fences_made, first_fence_of_block;
static u64* acquired;         // the fences that the present block has learnt of, or null: none
static bool all_published;
static enum : u8 { UNKNOWN, NO, YES } acquired_all;

static u64* fence_bits() { return static_cast<u64*>(calloc(fences_max / 64, sizeof(u64))); }
static bool has_fence(const u64* set, u32 fence) { return set[fence >> 6] >> (fence & 63) & 1; }

// Whether the fence publishes the access that the cell tells of, which is of the same block.
static bool publishes(u64 fence, u64 cell) {
    if (block_epoch_of(cell) != block_epoch_of(fence)) return block_epoch_of(cell) < block_epoch_of(fence);
    if (thread_of(cell) == thread_of(fence)) return fence_epoch_of(cell) <= fence_epoch_of(fence);
    return is_one_warp(cell, fence) && warp_epoch_of(cell) < warp_epoch_of(fence);
}

static bool is_acquired(u64 cell) {
    if (all_published) return true;
    if (!acquired) return false;
    // The first fence of the block, by bisection: blocks run one after another.
    u32 low = 0, high = first_fence_of_block;
    while (low < high) {
        u32 middle = (low + high) / 2;
        if (serial_of(fences[middle]) < serial_of(cell)) low = middle + 1;
        else high = middle;
    }
    for (; low < first_fence_of_block && serial_of(fences[low]) == serial_of(cell); low++)
        if (has_fence(acquired, low) && publishes(fences[low], cell)) return true;
    return false;
}

// Whether the present block has learnt of every block that ran before.
static bool has_acquired_all() {
    if (acquired_all != UNKNOWN) return acquired_all == YES;
    u64 blocks = 0;
    u32 last = 0;
    for (u32 i = 0; acquired && i < first_fence_of_block; i++) {
        if (!has_fence(acquired, i) || serial_of(fences[i]) == last) continue;
        last = serial_of(fences[i]);
        blocks++;
    }
    acquired_all = all_published || blocks == place_of(serial_now) ? YES : NO;
    return acquired_all == YES;
}

static Channel* channel_at(u64 address, bool make) {
    u32 slot = static_cast<u32>((address >> 2) * 0x9e3779b97f4a7c15ull >> 52) % channels_max;
    while (channels[slot].address && channels[slot].address != address) slot = (slot + 1) % channels_max;
    if (channels[slot].address) return &channels[slot];
    if (!make) return nullptr;
    if (++channels_used > channels_max / 2) {
        all_published = true;
        return nullptr;
    }
    channels[slot] = {address, fence_bits()};
    return &channels[slot];
}

static bool is_in_views(u64 address) { return address - launch->views_low < launch->views_bytes; }

static u64 in_first_view(u64 address) {
    return is_in_views(address) ? launch->views_low + ((address - launch->views_low) & (launch->view_bytes - 1)) : address;
}

// An atomic is how blocks learn of each other. One that leaves the value as it was publishes nothing: nobody can see that it
// happened. (Blocks run one after another here; on hardware others look at the same time.)
static void exchange_order(u64 address, bool is_change) {
    bool is_release = is_change && fences_made > first_fence_of_block;
    if (all_published || (!is_release && !channels_used)) return;
    Channel* channel = channel_at(address, is_release);
    if (!acquired) acquired = fence_bits();
    if (!channel || !channel->fences || !acquired) return;
    u32 words = (fences_made + 63) / 64;
    for (u32 word = 0; word < words; word++) acquired[word] |= channel->fences[word];
    acquired_all = UNKNOWN;
    if (!is_release) return;
    is_release = false;
    for (u32 i = first_fence_of_block; i < fences_made; i++) {
        if (thread_of(fences[i]) != thread_now && block_epoch_of(fences[i]) == block_epoch) continue;
        acquired[i >> 6] |= 1ull << (i & 63);
        is_release = true;
    }
    // It passes on what it has learnt, too.
    for (u32 word = 0; is_release && word < words; word++) channel->fences[word] |= acquired[word];
}

static void fence() {
    if (!intra || all_published) return;
    if (!fences) fences = static_cast<u64*>(malloc(fences_max * sizeof(u64)));
    if (!fences || fences_made == fences_max) {
        all_published = true;
        return;
    }
    fences[fences_made++] = cell_of(thread_now, false);
    if (fence_epoch[thread_now] < fence_epoch_max) fence_epoch[thread_now]++;
}

static void begin_block_order() {
    first_fence_of_block = fences_made;
    acquired_all = UNKNOWN;
    free(acquired);
    acquired = nullptr;
}

static void begin_launch_order() {
    for (u32 i = 0; channels_used && i < channels_max; i++) {
        free(channels[i].fences);
        channels[i] = {0, nullptr};
    }
    channels_used = fences_made = 0;
    all_published = false;
}

// ---- the order of accesses ----

// Whether what the cell says happened before what the running thread does now.
static bool is_ordered(u64 cell, bool is_shared) {
    u32 serial = serial_of(cell);
    // Shared memory is another one for every block.
    if (serial < launch->first_serial || (is_shared && serial != serial_now)) return true;
    u32 thread = thread_of(cell);
    if (thread == several_blocks) return has_acquired_all();
    if (serial != serial_now) return is_acquired(cell);
    if (thread == thread_now || block_epoch_of(cell) != block_epoch) return true;
    return thread / warp_lanes == thread_now / warp_lanes && warp_epoch_of(cell) < warp_epoch[thread_now];
}

static u64* sites_of(Window* window, u64 offset) { return window->cells + 2 * window->length_bytes + (offset >> 2) * 2; }

// What a cell becomes when the running thread joins others there that are not ordered with it.
static u64 joined(u64 cell, u64 mine, bool atomic, bool is_shared) {
    if (is_ordered(cell, is_shared)) return mine;
    return cell_of(serial_of(cell) == serial_now && thread_of(cell) != several_blocks ? several_threads : several_blocks, atomic);
}

[[gnu::noinline]] static void conflict(Window* window, u64 size_bytes, u64 at, Kind kind, u64 cell, Kind other, void* site) {
    Failure failure = failure_here(RACE, site);
    failure.access = kind;
    failure.address = at;
    failure.size_bytes = size_bytes;
    failure.other_thread = thread_of(cell);
    failure.other_access = other;
    failure.other_block = place_of(serial_of(cell));
    // The site is of the last access of its kind to these 4 bytes. Of several threads any is as good.
    u64 sites = sites_of(window, at - window->low)[other == READ];
    bool is_of_it = sites >> 31 == cell >> 31 || (thread_of(cell) >= several_threads && serial_of(sites) == serial_of(cell));
    if (is_of_it) failure.other_site = sites & 0x7fffffff;
    leave(failure);
}

// The two cells of a byte.
typedef u64 Cells __attribute__((vector_size(16)));

static bool is_equal(Cells a, Cells b) {
    Cells differ = a ^ b;
    return !(differ[0] | differ[1]);
}

static void follow(Window* window, u64 offset, u64 size_bytes, Kind kind, void* site) {
    if (intra_accesses_left == 0) {
        intra = false;
        return;
    }
    intra_accesses_left--;
    Cells* cells = reinterpret_cast<Cells*>(window->cells) + offset;
    u64 mine = cell_of(thread_now, kind == ATOMIC);
    u64 address = window->low + offset;
    bool is_shared = !window->marks;
    // The bytes of one access mostly have one history: four at a time, and what was found of one holds for the next.
    Cells before = {mine, mine}, after = before;
    for (u64 i = 0, count; i < size_bytes; i += count) {
        Cells now = cells[i];
        count = size_bytes - i >= 4 && is_equal((cells[i + 1] ^ now) | (cells[i + 2] ^ now) | (cells[i + 3] ^ now), Cells{0, 0}) ? 4 : 1;
        if (!is_equal(now, before) || i == 0) {
            u64 written = now[0], read = now[1];
            if (written != mine && !(kind == ATOMIC && is_atomic(written)) && !is_ordered(written, is_shared))
                conflict(window, size_bytes, address + i, kind, written, is_atomic(written) ? ATOMIC : WRITE, site);
            if (kind != READ && read != mine && !is_ordered(read, is_shared))
                conflict(window, size_bytes, address + i, kind, read, READ, site);
            before = after = now;
            if (kind == READ) after[1] = read == mine ? mine : joined(read, mine, false, is_shared);
            else after[0] = kind == ATOMIC && written != mine ? joined(written, mine, true, is_shared) : mine;
        }
        if (is_equal(now, after)) continue;
        for (u64 k = 0; k < count; k++) cells[i + k] = after;
    }
    u64 from = mine >> 31 << 31 | (site_of(site) & 0x7fffffff);
    u64* sites = sites_of(window, offset) + (kind == READ);
    for (u64 granule = offset >> 2; granule <= (offset + size_bytes - 1) >> 2; granule++, sites += 2) *sites = from;
}

// ---- windows ----

static Window* add_window(const Window& window) {
    u32 slot = windows_used < windows_max ? windows_used++ : windows_replaced++ % windows_max;
    windows[slot] = window;
    return &windows[slot];
}

// What of the library kernels may read outside of windows: its constants, which are in no writable segment, and the indices.
// Anything else of its data is a variable that is not simulated, or a margin of a shared one.
static bool is_constant(u8* pointer, u64 size_bytes) {
    static u8* end;
    if (!end) {
        const Elf64_Ehdr* header = reinterpret_cast<const Elf64_Ehdr*>(library_begin);
        const Elf64_Phdr* parts = reinterpret_cast<const Elf64_Phdr*>(library_begin + header->e_phoff);
        for (u32 i = 0; i < header->e_phnum; i++) {
            bool is_closed = (parts[i].p_type == PT_LOAD && !(parts[i].p_flags & PF_W)) || parts[i].p_type == PT_GNU_RELRO;
            u8* behind = library_begin + parts[i].p_vaddr + parts[i].p_memsz;
            if (is_closed && behind > end) end = behind;
        }
    }
    if (pointer >= library_begin && pointer + size_bytes <= end) return true;
    for (const Index* index : {&threadIdx, &blockIdx, &blockDim, &gridDim})
        if (pointer >= reinterpret_cast<const u8*>(index) && pointer + size_bytes <= reinterpret_cast<const u8*>(index + 1)) return true;
    return false;
}

// The window that holds all of an access; null: the thread's own stack or a constant, which are nobody's business.
// Leaves the kernel if there is none.
[[gnu::noinline]] static Window* find_window(u64 address, u64 size_bytes, Kind kind, void* site) {
    u8* pointer = reinterpret_cast<u8*>(address);
    if (pointer >= stack_low && pointer + size_bytes <= stack_high) return nullptr;
    Window* found = nullptr;
    for (u32 i = 0; i < windows_used && !found; i++)
        if (address - windows[i].low < windows[i].length_bytes) found = &windows[i];
    if (!found) {
        if (kind == READ && is_constant(pointer, size_bytes)) return nullptr;
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

// The bits of bytes that are in one word of marks.
static u64 bits_of(u64 offset, u64 size_bytes) {
    return (size_bytes == 64 ? ~0ull : (1ull << size_bytes) - 1) << (offset & 63);
}

// A read, or an atomic, of bytes of which some may never have been written. Tells the simulator the first; the launch goes on.
static void check_written(Window* window, u64 offset, u64 size_bytes, Kind kind, void* site) {
    u64 low = window->low, ahead = offset + (1 << 14);
    u64 until = launch->written_until(launch->context, low + offset, low + (ahead < window->length_bytes ? ahead : window->length_bytes)) - low;
    // The next question is about what comes behind.
    for (u64 at = offset; at < until; at = (at | 63) + 1) {
        u64 end = until < (at | 63) + 1 ? until : (at | 63) + 1;
        window->marks[(at >> 6) * 4 + 3] |= bits_of(at, end - at);
    }
    if (until >= offset + size_bytes || launch->unwritten.kind) return;
    launch->unwritten = failure_here(UNWRITTEN, site);
    launch->unwritten.access = kind;
    launch->unwritten.address = window->low + offset;
    launch->unwritten.size_bytes = size_bytes;
}

// Notes a read, or an atomic, of memory of which some was never written; the bytes are all in one word of marks.
[[gnu::noinline]] static void mark_read(Window* window, u64 offset, u64 size_bytes, Kind kind, void* site) {
    u64 *words = window->marks + (offset >> 6) * 4, bits = bits_of(offset, size_bytes);
    if (bits & ~(words[WRITE] | words[ATOMIC] | words[3])) check_written(window, offset, size_bytes, kind, site);
    words[kind] |= bits;
    window->pages[offset >> 12] = 1;
}

static void mark_bytes(Window* window, u64 offset, u64 size_bytes, Kind kind, void* site) {
    while (size_bytes) {
        u64 count = size_bytes < 64 - (offset & 63) ? size_bytes : 64 - (offset & 63);
        if (kind != WRITE && !window->read_marks) {
            mark_read(window, offset, count, kind, site);
        } else {
            window->marks[(offset >> 6) * 4 + kind] |= bits_of(offset, count);
            window->pages[offset >> 12] = 1;
        }
        offset += count;
        size_bytes -= count;
    }
}

static void access_range(u64 address, u64 size_bytes, Kind kind, void* site) {
    if (!size_bytes) return;
    Window* window = window_at(address, size_bytes, kind, site);
    if (!window) return;
    u64 offset = address - window->low;
    if (window->marks) mark_bytes(window, offset, size_bytes, kind, site);
    else if (copies_in_flight) check_copies(address, size_bytes, kind, site);
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
    u64* marks = kind == WRITE ? window->marks : window->read_marks;
    if (marks) {
        marks[(offset >> 6) * 4 + kind] |= ((1ull << size_bytes) - 1) << (offset & 63);
        window->pages[offset >> 12] = 1;
    } else if (kind != WRITE && window->marks) {
        mark_read(window, offset, size_bytes, kind, site);
    } else if (!window->marks && copies_in_flight) {
        check_copies(address, size_bytes, kind, site);
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
}

void simcuda_order(void* pointer, bool is_change) {
    if (simcuda::intra) simcuda::exchange_order(simcuda::in_first_view(reinterpret_cast<simcuda::u64>(pointer)), is_change);
}

void simcuda_fence() { simcuda::fence(); }

// Where __ldg reads what it finds at `pointer`: in the view whose reads are known to be cached.
const void* simcuda_cached(const void* pointer, unsigned long size_bytes) {
    simcuda::u64 address = reinterpret_cast<simcuda::u64>(pointer);
    if (!simcuda::is_in_views(address)) return pointer;
    simcuda::window_at(address, size_bytes, simcuda::READ, __builtin_return_address(0));
    return reinterpret_cast<const void*>(simcuda::in_first_view(address) + simcuda::launch->views_bytes - simcuda::launch->view_bytes);
}

// -fsanitize=bounds: an index into an array whose type says how long it is, be it shared, local or a member.
struct IndexCheck {
    const char* file;
    unsigned line, column;
    struct {
        unsigned short kind, info;
        char name[1];
    }* array;
};
[[noreturn]] void __ubsan_handle_out_of_bounds_abort(IndexCheck* check, unsigned long index) {
    simcuda::Failure failure = simcuda::failure_here(simcuda::INDEX, __builtin_return_address(0));
    failure.address = index;
    failure.text = check->array->name;
    simcuda::leave(failure);
}
}
#pragma GCC visibility pop
