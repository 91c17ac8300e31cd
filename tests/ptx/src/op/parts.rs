//! What operations have: registers, widths, places, and which of several functions.

use crate::text::Space;

/// A register: an index among those of its width.
pub(crate) type Slot = u16;

/// The width of a register.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Width {
    /// A predicate.
    P,
    /// 16 bits.
    H,
    /// 32 bits.
    W,
    /// 64 bits.
    D,
}

impl Width {
    pub(crate) const ALL: [Width; 4] = [Width::P, Width::H, Width::W, Width::D];

    pub(crate) fn bits(self) -> u32 {
        match self {
            Width::P => 1,
            Width::H => 16,
            Width::W => 32,
            Width::D => 64,
        }
    }
}

/// A register of any width.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Register {
    pub(crate) width: Width,
    pub(crate) slot: Slot,
}

/// Integer operations of two operands, or of one, which then is `a`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Int {
    Add,
    Sub,
    Mul,
    MulHighU,
    MulHighS,
    DivU,
    DivS,
    RemU,
    RemS,
    MinU,
    MinS,
    MaxU,
    MaxS,
    And,
    Or,
    Xor,
    Not,
    Neg,
    Abs,
    /// The last three take their amount from a 32-bit register.
    Shl,
    ShrU,
    ShrS,
}

/// Floating-point operations of two operands, or of one, which then is `a`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Float {
    Add,
    Sub,
    Mul,
    Div,
    DivApprox,
    DivFull,
    Min,
    Max,
    Neg,
    Abs,
    Sqrt,
    Rcp,
}

/// Comparisons. Those with U are also true if an operand is NaN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Compare {
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
    EqU,
    NeU,
    LtU,
    LeU,
    GtU,
    GeU,
    Number,
    Nan,
}

/// How far a strong access is one for other threads: those of its block, or all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Strength {
    /// Not strong.
    Weak,
    Block,
    /// `.gpu` and wider scopes.
    Device,
}

/// What an access or a fence means for the order of others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Strong {
    pub(crate) strength: Strength,
    pub(crate) acquires: bool,
    pub(crate) releases: bool,
}

impl Strong {
    pub(crate) const WEAK: Strong = Strong {
        strength: Strength::Weak,
        acquires: false,
        releases: false,
    };
}

/// What is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Compared {
    U16,
    S16,
    U32,
    S32,
    U64,
    S64,
    F32,
    F64,
}

/// Operations of predicates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Logic {
    And,
    Or,
    Xor,
    Not,
    Move,
}

/// How an element of memory becomes a register's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Element {
    pub(crate) bytes: u32,
    pub(crate) is_signed: bool,
}

/// A load's or store's address: `[base + offset]`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub(crate) space: Space,
    /// None: the offset is the address.
    pub(crate) base: Option<Register>,
    pub(crate) offset: i64,
}

/// Read-modify-write operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Atomic {
    Add,
    AddF32,
    AddF64,
    Exchange,
    CompareAndSwap,
    MinU,
    MinS,
    MaxU,
    MaxS,
    And,
    Or,
    Xor,
}

/// Where a shuffle reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shuffle {
    Up,
    Down,
    Butterfly,
    Index,
}

/// What lanes vote for or look for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Vote {
    All,
    Any,
    Uniform,
    Ballot,
}

/// What all threads of a barrier compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reduction {
    And,
    Or,
    Count,
}
