//! The modules of one crate, read from its files: which names each one defines or imports.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use proc_macro2::{TokenStream, TokenTree};
use quote::ToTokens as _;
use syn::{Attribute, Item, UseTree, Visibility};

/// A module's index in [`Crate::modules`].
pub(crate) type Id = usize;

/// All modules of one crate; the first one is its root.
pub(crate) struct Crate {
    pub(crate) modules: Vec<Module>,
    /// Files, in the order in which they were found. A module's file is an index here.
    pub(crate) files: Vec<PathBuf>,
}

/// One module: a file, or a `mod name { … }` inside one.
pub(crate) struct Module {
    pub(crate) parent: Option<Id>,
    pub(crate) file: usize,
    pub(crate) names: HashMap<String, Vec<Name>>,
    /// The paths of `use path::*`, each with its line.
    pub(crate) globs: Vec<(Vec<String>, usize)>,
    pub(crate) imports: Vec<Import>,
    /// Everything in this module that is neither a `use` nor a nested module.
    pub(crate) tokens: Vec<TokenStream>,
}

/// What a name stands for in a module.
#[derive(Clone)]
pub(crate) enum Name {
    Module(Id),
    Item,
    Macro,
    Import(Vec<String>),
}

/// One name of a `use`.
pub(crate) struct Import {
    pub(crate) path: Vec<String>,
    /// `pub use`, or `pub(crate) use` and the like.
    pub(crate) exported: bool,
    pub(crate) line: usize,
}

/// Part of a file that could not be read.
pub(crate) type Failure = String;

impl Crate {
    /// Reads the crate whose root is the file `root`.
    pub(crate) fn read(root: &Path) -> Result<Self, Failure> {
        let mut found = Self {
            modules: Vec::new(),
            files: Vec::new(),
        };
        let folder = root.parent().unwrap_or(Path::new("")).to_path_buf();
        found.read_file(root, &folder, None)?;
        Ok(found)
    }

    /// The child of the root that `id` is or lies below; 0 for the root.
    pub(crate) fn top_level(&self, mut id: Id) -> Id {
        while let Some(parent @ 1..) = self.modules[id].parent {
            id = parent;
        }
        id
    }

    /// The name of a module; empty for the root.
    pub(crate) fn name(&self, id: Id) -> &str {
        let parent = self.modules[id].parent.map(|parent| &self.modules[parent]);
        let mut names = parent.into_iter().flat_map(|parent| &parent.names);
        let is_id = |name: &Name| matches!(name, Name::Module(at) if *at == id);
        let found = names.find(|(_, all)| all.iter().any(is_id));
        found.map_or("", |(name, _)| name)
    }

    /// Reads a module's file; its children's files are in `folder`.
    fn read_file(&mut self, file: &Path, folder: &Path, parent: Option<Id>) -> Result<Id, Failure> {
        let text =
            fs::read_to_string(file).map_err(|e| format!("cannot read {}: {e}", file.display()))?;
        let parsed = syn::parse_file(&text).map_err(|e| {
            let at = e.span().start();
            format!("{}:{}: {e}", file.display(), at.line)
        })?;
        self.files.push(file.to_path_buf());
        let number = self.files.len() - 1;
        self.read_items(parsed.items, number, folder, parent)
    }

    fn read_items(
        &mut self,
        items: Vec<Item>,
        file: usize,
        folder: &Path,
        parent: Option<Id>,
    ) -> Result<Id, Failure> {
        let id = self.modules.len();
        self.modules.push(Module {
            parent,
            file,
            names: HashMap::new(),
            globs: Vec::new(),
            imports: Vec::new(),
            tokens: Vec::new(),
        });
        for item in items {
            if attributes(&item).iter().any(is_for_tests) {
                continue;
            }
            match item {
                Item::Mod(module) => {
                    let name = module.ident.to_string();
                    let child = self.read_module(module, file, folder, id)?;
                    self.define(id, name, Name::Module(child));
                }
                Item::Use(item) => {
                    let exported = !matches!(item.vis, Visibility::Inherited);
                    if item.leading_colon.is_none() {
                        self.import(id, &item.tree, Vec::new(), exported);
                    }
                }
                item => {
                    if let Some(name) = name_of(&item) {
                        let what = match item {
                            Item::Macro(_) => Name::Macro,
                            _ => Name::Item,
                        };
                        self.define(id, name, what);
                    }
                    self.modules[id].tokens.push(item.into_token_stream());
                }
            }
        }
        Ok(id)
    }

    fn read_module(
        &mut self,
        module: syn::ItemMod,
        file: usize,
        folder: &Path,
        parent: Id,
    ) -> Result<Id, Failure> {
        let name = module.ident.to_string();
        let below = folder.join(&name);
        if let Some((_, items)) = module.content {
            return self.read_items(items, file, &below, Some(parent));
        }
        let beside = folder.join(format!("{name}.rs"));
        let inside = below.join("mod.rs");
        if let Some(path) = path_attribute(&module.attrs) {
            let file = self.files[file].with_file_name(path);
            let folder = file.with_extension("");
            return self.read_file(&file, &folder, Some(parent));
        }
        let source = if inside.exists() { inside } else { beside };
        self.read_file(&source, &below, Some(parent))
    }

    fn define(&mut self, module: Id, name: String, what: Name) {
        self.modules[module]
            .names
            .entry(name)
            .or_default()
            .push(what);
    }

    /// Adds the names that a `use` brings into a module.
    fn import(&mut self, module: Id, tree: &UseTree, mut path: Vec<String>, exported: bool) {
        let line;
        let name;
        match tree {
            UseTree::Path(tree) => {
                path.push(tree.ident.to_string());
                return self.import(module, &tree.tree, path, exported);
            }
            UseTree::Group(group) => {
                for tree in &group.items {
                    self.import(module, tree, path.clone(), exported);
                }
                return;
            }
            UseTree::Glob(glob) => {
                let line = glob.star_token.span.start().line;
                self.modules[module].globs.push((path, line));
                return;
            }
            UseTree::Name(last) => {
                line = last.ident.span().start().line;
                if last.ident != "self" {
                    path.push(last.ident.to_string());
                }
                name = path.last().cloned().unwrap_or_default();
            }
            UseTree::Rename(last) => {
                line = last.ident.span().start().line;
                if last.ident != "self" {
                    path.push(last.ident.to_string());
                }
                name = last.rename.to_string();
            }
        }
        self.define(module, name, Name::Import(path.clone()));
        self.modules[module].imports.push(Import {
            path,
            exported,
            line,
        });
    }
}

/// Whether `#[cfg(test)]` or `#[cfg(all(test, …))]` keeps an item out of what is built for users.
pub(crate) fn is_for_tests(attribute: &Attribute) -> bool {
    let mut tokens = TokenStream::new();
    attribute.meta.to_tokens(&mut tokens);
    is_cfg_test(tokens)
}

/// Whether `tokens`, the inside of `#[…]`, say `cfg(test)` or `cfg(all(test, …))`.
pub(crate) fn is_cfg_test(tokens: TokenStream) -> bool {
    let text: String = tokens
        .to_string()
        .chars()
        .filter(|c| !c.is_whitespace())
        .collect();
    text == "cfg(test)" || text.starts_with("cfg(all(test,") || text.starts_with("cfg(all(doctest")
}

fn path_attribute(attributes: &[Attribute]) -> Option<String> {
    let attribute = attributes.iter().find(|a| a.path().is_ident("path"))?;
    let value = &attribute.meta.require_name_value().ok()?.value;
    match value.to_token_stream().into_iter().next()? {
        TokenTree::Literal(text) => Some(text.to_string().trim_matches('"').to_owned()),
        _ => None,
    }
}

fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::ExternCrate(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::ForeignMod(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::TraitAlias(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Union(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

fn name_of(item: &Item) -> Option<String> {
    let name = match item {
        Item::Const(item) => &item.ident,
        Item::Enum(item) => &item.ident,
        Item::Fn(item) => &item.sig.ident,
        Item::Macro(item) => item.ident.as_ref()?,
        Item::Static(item) => &item.ident,
        Item::Struct(item) => &item.ident,
        Item::Trait(item) => &item.ident,
        Item::Type(item) => &item.ident,
        Item::Union(item) => &item.ident,
        _ => return None,
    };
    Some(name.to_string())
}
