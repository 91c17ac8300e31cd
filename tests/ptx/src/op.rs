//! Decoded instructions. Registers are slots of the warp's register file, by their width.

mod parts;

use crate::number::{Approximate, Conversion};

pub(crate) use self::parts::*;

/// An instruction without its guard.
#[derive(Clone, Debug)]
pub(crate) enum Op {
    Int {
        width: Width,
        op: Int,
        d: Slot,
        a: Slot,
        b: Slot,
    },
    /// `mul.wide` and, with `c`, `mad.wide`.
    Wide {
        from: Width,
        is_signed: bool,
        d: Slot,
        a: Slot,
        b: Slot,
        c: Option<Slot>,
    },
    /// `mad.lo`.
    Mad {
        width: Width,
        d: Slot,
        a: Slot,
        b: Slot,
        c: Slot,
    },
    F32 {
        op: Float,
        ftz: bool,
        d: Slot,
        a: Slot,
        b: Slot,
    },
    F64 {
        op: Float,
        d: Slot,
        a: Slot,
        b: Slot,
    },
    Fma32 {
        ftz: bool,
        d: Slot,
        a: Slot,
        b: Slot,
        c: Slot,
    },
    Fma64 {
        d: Slot,
        a: Slot,
        b: Slot,
        c: Slot,
    },
    Approximate {
        function: Approximate,
        ftz: bool,
        d: Slot,
        a: Slot,
    },
    /// `setp`; `with` is a predicate that the result is combined with.
    Setp {
        compare: Compare,
        of: Compared,
        ftz: bool,
        d: Slot,
        inverse: Option<Slot>,
        a: Slot,
        b: Slot,
        with: Option<(Logic, Slot, bool)>,
    },
    Select {
        width: Width,
        d: Slot,
        a: Slot,
        b: Slot,
        p: Slot,
    },
    Logic {
        op: Logic,
        d: Slot,
        a: Slot,
        b: Slot,
    },
    Move {
        width: Width,
        d: Slot,
        a: Slot,
    },
    /// Low parts first, all of one width.
    Pack {
        d: Register,
        parts: Box<[Register]>,
    },
    Unpack {
        parts: Box<[Register]>,
        a: Register,
    },
    Convert {
        how: Conversion,
        d: Register,
        a: Register,
    },
    /// Integers to wider or narrower registers.
    Extend {
        is_signed: bool,
        bits: u32,
        d: Register,
        a: Register,
    },
    /// `cvt.rn.bf16x2.f32`: a is the upper half.
    Bf16x2 {
        d: Slot,
        a: Slot,
        b: Slot,
    },
    Insert {
        width: Width,
        d: Slot,
        a: Slot,
        b: Slot,
        position: Slot,
        length: Slot,
    },
    Extract {
        width: Width,
        is_signed: bool,
        d: Slot,
        a: Slot,
        position: Slot,
        length: Slot,
    },
    Permute {
        d: Slot,
        a: Slot,
        b: Slot,
        selector: Slot,
    },
    Lookup {
        d: Slot,
        a: Slot,
        b: Slot,
        c: Slot,
        table: u32,
    },
    /// `shf`: to the left or right by an amount that wraps or is clamped.
    Funnel {
        is_left: bool,
        wraps: bool,
        d: Slot,
        a: Slot,
        b: Slot,
        amount: Slot,
    },
    /// `popc`, `clz`, `brev` and `bfind` have results of 32 bits, `brev` of its own width.
    Count {
        width: Width,
        d: Slot,
        a: Slot,
    },
    LeadingZeros {
        width: Width,
        d: Slot,
        a: Slot,
    },
    Reverse {
        width: Width,
        d: Slot,
        a: Slot,
    },
    /// To generic addresses (by adding the window's base) or from them.
    Rebase {
        d: Slot,
        a: Register,
        add: u64,
    },
    Load {
        place: Place,
        element: Element,
        read_only: bool,
        strong: Strong,
        to: Box<[Register]>,
    },
    Store {
        place: Place,
        element: Element,
        strong: Strong,
        from: Box<[Register]>,
    },
    Atomic {
        op: Atomic,
        place: Place,
        bytes: u32,
        strong: Strong,
        d: Option<Register>,
        b: Register,
        c: Option<Register>,
    },
    /// `cp.async`: of `bytes`, those after the first `given` are zero.
    CopyAsync {
        to: Place,
        from: Place,
        bytes: u32,
        given: Option<Slot>,
    },
    CommitCopies,
    /// All but so many of the latest groups; None also waits for copies of no group yet.
    WaitCopies {
        but: Option<u32>,
    },
    LoadMatrix {
        place: Place,
        is_transposed: bool,
        to: Box<[Slot]>,
    },
    /// `mma.m16n8k16`, f32 += bf16 or f16.
    Multiply {
        is_f16: bool,
        d: [Slot; 4],
        a: [Slot; 4],
        b: [Slot; 2],
        c: [Slot; 4],
    },
    Shuffle {
        how: Shuffle,
        d: Slot,
        is_valid: Option<Slot>,
        a: Slot,
        b: Slot,
        c: Slot,
        members: Slot,
    },
    Vote {
        how: Vote,
        d: Slot,
        a: Slot,
        is_inverted: bool,
        members: Slot,
    },
    /// `match.any` and `match.all`.
    Match {
        is_all: bool,
        is_same: Option<Slot>,
        d: Slot,
        a: Register,
        members: Slot,
    },
    ActiveMask {
        d: Slot,
    },
    WarpBarrier {
        members: Slot,
    },
    /// `bar.sync`, `bar.arrive` and `bar.red`.
    Barrier {
        id: Slot,
        threads: Option<Slot>,
        arrives_only: bool,
        reduce: Option<Reduce>,
    },
    Fence(Strong),
    /// `fence.proxy.async`.
    ProxyFence,
    Wgmma(Wgmma),
    Branch {
        target: u32,
    },
    Exit,
    Trap,
}

/// What a warpgroup does together.
#[derive(Clone, Debug)]
pub(crate) enum Wgmma {
    Fence,
    Multiply(Box<GroupProduct>),
    Commit,
    /// All but so many of the latest groups.
    Wait {
        but: u32,
    },
}

/// `wgmma.mma_async.m64nNk16`, f32 += bf16.
#[derive(Clone, Debug)]
pub(crate) struct GroupProduct {
    /// N / 2 of them.
    pub(crate) d: Box<[Slot]>,
    pub(crate) a: Left,
    /// A descriptor.
    pub(crate) b: Slot,
    /// `imm-trans-b`: N-major instead of K-major.
    pub(crate) is_turned: bool,
    /// `scale-d`, a predicate: without it D is not read.
    pub(crate) adds: Slot,
    /// One of `imm-scale-a` and `imm-scale-b` is -1.
    pub(crate) is_negated: bool,
}

/// The left factor of a warpgroup's product.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Left {
    Registers([Slot; 4]),
    /// A descriptor; `imm-trans-a`: M-major instead of K-major.
    Matrix {
        descriptor: Slot,
        is_turned: bool,
    },
}

/// What an ordinary instruction does to registers that are fragments of `wgmma`.
#[derive(Clone, Debug)]
pub(crate) struct Touched {
    pub(crate) reads: Vec<Slot>,
    pub(crate) writes: Vec<Slot>,
}

/// The reduction of a barrier.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reduce {
    pub(crate) op: Reduction,
    /// A predicate, or a count in 32 bits.
    pub(crate) d: Slot,
    pub(crate) a: Slot,
    pub(crate) is_inverted: bool,
}

/// An instruction.
#[derive(Clone, Debug)]
pub(crate) struct Coded {
    pub(crate) op: Op,
    /// A predicate, and whether it is negated.
    pub(crate) guard: Option<(Slot, bool)>,
    pub(crate) touched: Option<Box<Touched>>,
    pub(crate) line: u32,
    pub(crate) source: (u32, u32),
}
