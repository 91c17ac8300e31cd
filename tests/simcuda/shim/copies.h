// Part of runtime.cpp: copies from device to shared memory that a thread starts and later waits for (PTX ISA, "cp.async").
// The bytes are there once the thread has waited for the group of the copy, and for other threads after a barrier behind that.
// From the start to the wait nobody may touch them: they are 0xFF, and each access is a failure. The source is read at the start.
#pragma once

namespace simcuda {

struct Copy {
    u8* to;
    u32 size_bytes;
    u64 group;  // of its thread, counted from 0
    void* site;
    u8 data[16];
};

// Of each thread of the block.
static Copy* copies[threads_max];
static u32 copies_started[threads_max], copies_room[threads_max];
static u64 groups_ended[threads_max];
// For every 4 bytes of shared memory, dynamic and then static: the thread that copies to them, counted from 1; 0: none.
static unsigned short copying[(dynamic_shared_bytes_max + static_shared_bytes_max) / 4];

// Null outside of shared memory.
static unsigned short* copying_at(u64 address) {
    u64 offset = address - reinterpret_cast<u64>(simcuda_dynamic_shared), base = dynamic_shared_bytes_max;
    if (offset < dynamic_shared_bytes_max) return copying + offset / 4;
    for (u64 i = 0; i < launch->shared_spans; i++) {
        u64 begin = reinterpret_cast<u64>(launch->shared[i].begin), bytes = reinterpret_cast<u64>(launch->shared[i].end) - begin;
        if (address - begin < bytes) return copying + (base + address - begin) / 4;
        base += (bytes + 3) / 4 * 4;
    }
    return nullptr;
}

static void check_copies(u64 address, u64 size_bytes, Kind kind, void* site) {
    for (u64 at = address & ~3ull; at < address + size_bytes; at += 4) {
        unsigned short* of = copying_at(at);
        if (!of || !*of) continue;
        Failure failure = failure_here(COPY, site);
        failure.access = kind;
        failure.address = address;
        failure.size_bytes = size_bytes;
        failure.other_thread = *of - 1u;
        for (u32 i = 0; i < copies_started[*of - 1]; i++) {
            const Copy& copy = copies[*of - 1][i];
            if (at - reinterpret_cast<u64>(copy.to) < copy.size_bytes) failure.other_site = site_of(copy.site);
        }
        leave(failure);
    }
}

static void mark_copy(const Copy& copy, u32 thread) {
    for (u32 at = 0; at < copy.size_bytes; at += 4) *copying_at(reinterpret_cast<u64>(copy.to) + at) = static_cast<unsigned short>(thread);
    if (thread) copies_in_flight++;
    else copies_in_flight--;
}

// Copies `bytes` bytes; zeros follow up to `size_bytes`.
static void start_copy(u8* to, const u8* from, u32 size_bytes, u32 bytes, void* site) {
    u64 source = reinterpret_cast<u64>(from), target = reinterpret_cast<u64>(to);
    if (source & (size_bytes - 1)) misaligned(source, size_bytes, READ, site);
    if (target & (size_bytes - 1)) misaligned(target, size_bytes, WRITE, site);
    if (!copying_at(target)) {
        Failure failure = failure_here(ADDRESS, site);
        failure.access = WRITE;
        failure.address = target;
        failure.size_bytes = size_bytes;
        leave(failure);
    }
    access_range(source, bytes, READ, site);
    access_range(target, size_bytes, WRITE, site);
    u32 thread = thread_now, count = copies_started[thread]++;
    if (count == copies_room[thread]) {
        copies_room[thread] = count ? count * 2 : 64;
        copies[thread] = static_cast<Copy*>(realloc(copies[thread], copies_room[thread] * sizeof(Copy)));
    }
    Copy& copy = copies[thread][count];
    copy = {to, size_bytes, groups_ended[thread], site, {}};
    memcpy(copy.data, from, bytes);
    memset(to, 0xff, size_bytes);
    mark_copy(copy, thread + 1);
}

// Waits for all groups of the thread but the last `pending` that it has ended.
static void wait_for_copies(u64 pending) {
    u32 thread = thread_now, kept = 0;
    for (u32 i = 0; i < copies_started[thread]; i++) {
        Copy copy = copies[thread][i];
        if (copy.group + pending >= groups_ended[thread]) {
            copies[thread][kept++] = copy;
            continue;
        }
        mark_copy(copy, 0);
        access_range(reinterpret_cast<u64>(copy.to), copy.size_bytes, WRITE, copy.site);
        memcpy(copy.to, copy.data, copy.size_bytes);
    }
    copies_started[thread] = kept;
}

static void forget_copies() {
    if (copies_in_flight) memset(copying, 0, sizeof copying);
    copies_in_flight = 0;
    memset(copies_started, 0, sizeof copies_started);
    memset(groups_ended, 0, sizeof groups_ended);
}

}  // namespace simcuda
