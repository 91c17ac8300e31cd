//! The text of PTX as statements: directives, labels and instructions with their operands, each
//! with its line. What they mean is for `decode`.

mod reading;

pub(crate) use self::reading::{read, type_bytes};

/// A module: variables, and kernels whose bodies are still text.
#[derive(Debug, Default)]
pub(crate) struct Text {
    /// Source files by number: their names without folders.
    pub(crate) files: Vec<(u32, String)>,
    pub(crate) variables: Vec<Variable>,
    pub(crate) kernels: Vec<KernelText>,
    /// `sm_90a`.
    pub(crate) target: String,
}

/// One `.entry`.
#[derive(Debug)]
pub(crate) struct KernelText {
    pub(crate) name: String,
    pub(crate) parameters: Vec<Variable>,
    /// The product of `.maxntid` or `.reqntid`.
    pub(crate) threads_max: Option<u32>,
    body: Body,
}

/// Between the braces of a kernel, and the line where it begins. It is read when the kernel is
/// decoded: a program uses few kernels of a module.
#[derive(Debug)]
struct Body {
    text: String,
    line: u32,
}

/// A state space that variables can be in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Space {
    Generic,
    Global,
    Shared,
    Local,
    Param,
    Const,
}

/// `.shared .align 4 .b8 name[128]`.
#[derive(Clone, Debug)]
pub(crate) struct Variable {
    pub(crate) name: String,
    pub(crate) space: Space,
    pub(crate) alignment: u64,
    pub(crate) bytes: u64,
    /// Declared `[]`: dynamic shared memory.
    pub(crate) is_open: bool,
}

/// A register with its width: `.reg .b32 %r<5>` declares five.
#[derive(Debug)]
pub(crate) struct Registers {
    pub(crate) prefix: String,
    /// None for a single name.
    pub(crate) count: Option<u32>,
    pub(crate) kind: String,
}

/// What a body consists of.
#[derive(Debug)]
pub(crate) enum Content {
    Registers(Registers),
    Variable(Variable),
    Label(String),
    Instruction(Instruction),
    Open,
    Close,
}

/// A statement, its line in the PTX, and the file and line that `.loc` named last.
#[derive(Debug)]
pub(crate) struct Statement {
    pub(crate) content: Content,
    pub(crate) line: u32,
    pub(crate) source: (u32, u32),
}

/// `@!%p1 op.a.b d, a, b`.
#[derive(Debug)]
pub(crate) struct Instruction {
    /// A register, and whether it is negated.
    pub(crate) guard: Option<(String, bool)>,
    /// The opcode's parts: `ld`, `global`, `f32`.
    pub(crate) parts: Vec<String>,
    pub(crate) operands: Vec<Operand>,
}

impl Instruction {
    /// The opcode as written.
    pub(crate) fn opcode(&self) -> String {
        self.parts.join(".")
    }
}

/// An operand.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Operand {
    /// A register, special register, variable or label.
    Name(String),
    /// `!%p`.
    Not(String),
    /// The two results of `setp` and `shfl`.
    Pair(String, String),
    /// An integer.
    Integer(i128),
    /// `0f3F800000`.
    F32(u32),
    /// `0d3FF0000000000000`.
    F64(u64),
    /// `{a, b}`.
    Vector(Vec<Operand>),
    /// `[name + offset]`; without a name the offset is the address.
    Address(Option<String>, i64),
}
