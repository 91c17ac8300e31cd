//! What NVRTC compiles.

/// A program as it was created.
#[derive(Clone, Debug, Default)]
pub(crate) struct Program {
    pub(crate) name: String,
    pub(crate) source: String,
    /// (name, text) of headers included by name.
    pub(crate) headers: Vec<(String, String)>,
    /// Arguments of nvrtcAddNameExpression.
    pub(crate) expressions: Vec<String>,
}
