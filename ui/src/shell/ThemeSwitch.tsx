import { switchTheme, useTheme } from "../theme";

export function ThemeSwitch() {
  const theme = useTheme();
  return (
    <button type="button" className="plain" onClick={switchTheme} aria-label={`Switch to the ${theme === "dark" ? "light" : "dark"} theme`}>
      {theme === "dark" ? "Light" : "Dark"}
    </button>
  );
}
