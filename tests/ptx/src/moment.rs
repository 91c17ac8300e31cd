//! When a thread touches memory, in a number that later accesses are compared with.

/// When a thread does something: after how many barriers of its block and of its warp.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Moment {
    pub(crate) block: u32,
    pub(crate) warp: u32,
    /// In its block.
    pub(crate) thread: u32,
    /// The instruction.
    pub(crate) at: u32,
}

/// An access: `moment:32 | barriers of the warp:16 | who:11 | fences:3 | strength:2`. Moments count
/// the barriers of blocks, over all launches. Of several blocks: how many they are, in place of the
/// barriers of the warp. 0: no access yet.
pub(crate) type Stamp = u64;

/// `who` below is a thread of its block. From here on: several threads of one warp, of a block, of
/// several blocks.
pub(crate) const OF_WARP: u32 = 1024;
pub(crate) const OF_BLOCK: u32 = OF_WARP + 32;
pub(crate) const OF_BLOCKS: u32 = OF_BLOCK + 1;

/// The other side of a race.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Other {
    pub(crate) stamp: Stamp,
    pub(crate) at: u32,
    /// `read`, `wrote`, `updated (atomic)`.
    pub(crate) does: &'static str,
}

/// Who made an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Who {
    Thread(u32),
    Warp(u32),
    Block,
    Blocks,
}

pub(crate) fn who_of(stamp: Stamp) -> Who {
    match who(stamp) {
        several if several >= OF_BLOCKS => Who::Blocks,
        OF_BLOCK => Who::Block,
        several if several >= OF_WARP => Who::Warp(several - OF_WARP),
        thread => Who::Thread(thread),
    }
}

/// Whether it is of one block.
pub(crate) fn is_of_block(stamp: Stamp) -> bool {
    who(stamp) != OF_BLOCKS
}

pub(crate) fn moment(stamp: Stamp) -> u32 {
    (stamp >> 32) as u32
}

pub(crate) fn warp_barriers(stamp: Stamp) -> u32 {
    (stamp >> 16) as u32 & 0xffff
}

/// How many blocks a stamp of several blocks stands for, up to 65,535.
pub(crate) fn block_count(stamp: Stamp) -> u32 {
    warp_barriers(stamp)
}

pub(crate) fn who(stamp: Stamp) -> u32 {
    stamp as u32 >> 5 & 0x7ff
}

pub(crate) fn fences(stamp: Stamp) -> u32 {
    stamp as u32 >> 2 & 7
}

pub(crate) fn strength(stamp: Stamp) -> u32 {
    stamp as u32 & 3
}

/// The warp of a thread, or of several; `OF_BLOCK` for more.
pub(crate) fn warp_of(who: u32) -> u32 {
    match who {
        several if several >= OF_BLOCK => OF_BLOCK,
        several if several >= OF_WARP => several - OF_WARP,
        thread => thread / 32,
    }
}
